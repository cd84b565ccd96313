"""KeyValueCache: packed requests append to their caches, and get all that is there as packed rows of numbers."""

from __future__ import annotations

from ...attention.gather import gather, inputs
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import MOST_SIZE, Value
from ..asserted import asserted
from ..attend import packed
from . import ppl_op
from .cache import cache_of, updated
from .legal import legal
from .requests import present, requests


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
    """Keys and values [NK, Hkv * num_repeat, D], and cache and scale with the new rows."""
    repeat = node.attr("num_repeat", 1)
    if not 1 <= repeat <= MOST_SIZE:
        raise node.error(f"attribute num_repeat is {repeat}.", f"Use 1 to {MOST_SIZE}.")
    present(node, max_seqlen=max_seqlen, max_kvlen=max_kvlen)
    key, value = current_key, current_value
    if key.rank != 3 or value.rank != 3 or key.dtype != value.dtype:
        raise node.error(
            f"current_key is {key.dtype} of rank {key.rank}, current_value {value.dtype} of rank {value.rank}.",
            "Make them [tokens, heads, head_dim] of one type.",
        )
    heads, size = (number(node, f"dimension {axis} of current_key", key.shape[axis]) for axis in (1, 2))
    key, value = (asserted(node, x, (current_key.shape[0], heads, size)) for x in (key, value))
    before = cache_of(node, heads, key, seqstarts, cachestarts, cache, scale)
    seqstarts = legal(
        node, key.shape[0], seqstarts, kvstarts, cachestarts=cachestarts, start_pos=start_pos, cache=before
    )
    batch = requests(node, key.shape[0], seqstarts, kvstarts, None, before.capacity)
    after = updated(node, before, batch, start_pos, key, value)
    problem = packed(batch.batch, (heads, heads), size, key.dtype, after.layout, scale=1.0)
    given = {**after.tensors, "lengths": batch.lengths, "key_starts": batch.key_starts}
    arguments = [node.tensor(given[name]) for name in inputs(problem)]
    outputs = [((batch.all_keys, heads * repeat, size), key.dtype)] * 2
    keys, values = node.call_tir(gather(problem, repeat), arguments, outputs, "gather")
    return keys, values, after.tensors["kv"], after.tensors.get("kv_scale", scale)
