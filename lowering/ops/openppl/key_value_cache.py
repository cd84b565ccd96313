"""KeyValueCache: append packed requests to their caches, and return all keys and values as packed dequantized rows."""

from __future__ import annotations

from ...attention.gather import build_gather, list_gather_inputs
from ...importing.node import Node
from ...importing.values import MAX_DIMENSION, Value
from ..attention.attend import make_ragged_problem
from ..helpers.assertions import assert_shape
from ..helpers.compute import number
from ..helpers.requirements import require_range, require_tensor
from . import ppl_op
from .ppl_cache import append_to_cache, read_cache
from .ppl_requests import read_requests, require_present
from .table_checks import check_tables


@ppl_op("KeyValueCache")
def key_value_cache(
    node: Node,
    current_key: Value,
    current_value: Value,
    seqstarts: Value,
    kvstarts: Value,
    cachestarts: Value,
    start_pos: Value,
    max_seqlen: Value,
    max_kvlen: Value,
    cache: Value,
    scale: Value | None = None,
) -> tuple[Value, Value, Value, Value | None]:
    """Return keys and values [NK, Hkv * num_repeat, D], and cache and scale with the new rows."""
    repeat = require_range(node, "num_repeat", node.attr("num_repeat", 1), 1, MAX_DIMENSION)
    require_present(node, max_seqlen=max_seqlen, max_kvlen=max_kvlen)
    key, value = current_key, current_value
    for name, x in (("current_key", key), ("current_value", value)):
        require_tensor(node, name, x, key.dtype, "[tokens, heads, head_dim]")
    heads, size = (number(node, f"dimension {axis} of current_key", key.shape[axis]) for axis in (1, 2))
    key, value = (assert_shape(node, x, (current_key.shape[0], heads, size)) for x in (key, value))
    cache_before = read_cache(node, heads, key, seqstarts, cachestarts, cache, scale)
    seqstarts = check_tables(
        node, key.shape[0], seqstarts, kvstarts, cachestarts=cachestarts, start_pos=start_pos, cache=cache_before
    )
    packed_requests = read_requests(node, key.shape[0], seqstarts, kvstarts, None, cache_before.capacity)
    cache_after = append_to_cache(node, cache_before, packed_requests, start_pos, key, value)
    problem = make_ragged_problem(packed_requests.batch, (heads, heads), size, key.dtype, cache_after.layout, scale=1.0)
    bindings = {**cache_after.tensors, "lengths": packed_requests.lengths, "key_starts": packed_requests.key_starts}
    arguments = [node.tensor(bindings[name]) for name in list_gather_inputs(problem)]
    outputs = [((packed_requests.all_keys, heads * repeat, size), key.dtype)] * 2
    keys, values = node.call_tir(build_gather(problem, repeat), arguments, outputs, "gather")
    return keys, values, cache_after.tensors["kv"], cache_after.tensors.get("kv_scale", scale)
