"""ServedAttention: packed requests append to one paged cache of all layers, and attend to what is there."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx

from ...attention.append import Append
from ...attention.formula import Formula
from ...attention.parameters import int64
from ...attention.problem import Window
from ...attention.store import Codec, Pages, Store
from ...graph.legality import OWN_DOMAIN
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Size, Value, product, static
from .. import op
from ..append import append
from ..asserted import asserted
from ..attend import formula_of, packed, solved
from ..run_time import bind


@op("ServedAttention", since=1, domain=OWN_DOMAIN)
def served_attention(
    node: Node,
    q: Value,
    k: Value,
    v: Value,
    row_starts: Value,
    first_rows: Value,
    row_counts: Value,
    past: Value,
    lengths: Value,
    most: Value,
    entries: Value,
    kv_cache: Value,
    kv_cache_scale: Value | None = None,
    bias: Value | None = None,
    sink: Value | None = None,
) -> tuple[Value, Value, Value | None]:
    """Y like q, and the cache and its scales with the new keys and values of layer `layer`.

    q [1, Hq, N, D]; k, v [1, Hkv, N, D]; the tables are those of PackedRequests. kv_cache [blocks, layers, 2, Hkv,
    tokens, D], int8 with float32 kv_cache_scale [blocks, layers, 2, Hkv, tokens, groups]. A token sees left_window_size
    keys before its own, all if that is -1. bias, float32 [heads or 1, ...], is added to scores, bias_by "key",
    "distance" or "pair" of positions below `context`. sink is [Hq]. Where `writes` is 0, another node of this layer has
    written k and v.
    """
    heads, size = (number(node, f"dimension {axis} of k", k.shape[axis]) for axis in (1, 3))
    rows, q_heads = q.shape[2], number(node, "dimension 1 of q", q.shape[1])
    layer, left = node.attr("layer"), node.attr("left_window_size")
    pages = node.emit(relax.op.add(node.tensor(entries), node.tensor(node.constant(np.array([2 * layer], np.int64)))))
    codec, tensors = None, {"kv": _blocks(node, kv_cache), "pages": pages}
    if kv_cache_scale is not None:
        groups = number(node, "dimension 5 of kv_cache_scale", kv_cache_scale.shape[5])
        codec = Codec("int8", size // groups)
        tensors["kv_scale"] = _blocks(node, asserted(node, kv_cache_scale, (*kv_cache.shape[:-1], groups)))
    tokens = number(node, "dimension 4 of kv_cache", kv_cache.shape[4])
    store = Store("phtd", Pages(tokens, "page", apart=True), codec=codec)
    record = Append(static(past.shape[0]), heads, size, size, k.dtype, store)
    new = {"new_k": _rows_first(node, k), "new_v": _rows_first(node, v)}
    where = {"row_starts": first_rows, "row_counts": row_counts, "starts": past}
    if node.attr("writes"):
        tensors |= append(node, record, {**new, **where, **tensors})
    most_rows, most_keys = bind(node, most)
    change, read = _change(node, bias, past)
    problem = packed(
        past.shape[0],
        (q_heads, heads),
        size,
        q.dtype,
        store,
        "htd",
        scale=node.attr("scale"),
        softcap=node.attr("softcap"),
        window=Window(None if left < 0 else left, 0, "lengths"),
        score=change,
        sink=sink is not None,
    )
    given: dict[str, Value | Size] = {"q": node.reshaped(q, (q_heads, rows, size)), **tensors}
    if sink is not None:
        given["sink"] = asserted(node, sink, (q_heads,))
    given |= {"row_starts": row_starts, "lengths": lengths, "most_rows": most_rows, "most_keys": most_keys}
    y = solved(node, problem, {**given, **read}, most_keys)["y"]
    scale = None if kv_cache_scale is None else node.reshaped(tensors["kv_scale"], kv_cache_scale.shape)
    return node.reshaped(y, q.shape), node.reshaped(tensors["kv"], kv_cache.shape), scale


def _blocks(node: Node, cache: Value) -> Value:
    """[blocks, layers, 2, ...] as blocks of one layer and kind, so that all layers have the same kernels."""
    count = node.simplify(product(cache.shape[:3]))
    return node.reshaped(cache, (count, *cache.shape[3:]))


def _rows_first(node: Node, x: Value) -> Value:
    """[1, H, N, D] as [N, H, D]."""
    turned = node.emit(relax.op.permute_dims(node.tensor(x), [0, 2, 1, 3]))
    return node.reshaped(turned, (x.shape[2], x.shape[1], x.shape[3]))


def _change(node: Node, bias: Value | None, past: Value) -> tuple[Formula | None, dict[str, Any]]:
    """What is added to scores."""
    if bias is None:
        return None, {}
    by, last, one = node.attr("bias_by"), int64(node.attr("context") - 1), bias.shape[0] == 1

    def element(b: Any, h: Any, i: Any, j: Any, s: Any, bias: Any, past: Any) -> Any:
        token, key = (tirx.max(tirx.min(x, last), int64(0)) for x in (past(b) + i, j))
        distance = tirx.max(tirx.min(past(b) + i - j, last), int64(0))
        at = {"key": (key,), "distance": (distance,), "pair": (token, key)}[by]
        return s + bias(int64(0) if one else h, *at)

    return formula_of(element, [bias, past], "float32")
