"""ServedAttention: packed rows of requests attend to what one layer of a paged cache holds of each."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...attention.formula import Formula
from ...attention.parameters import int64
from ...attention.problem import Window
from ...graph.legality import OWN_DOMAIN
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..asserted import asserted
from ..attend import formula_of, packed, solved
from ..run_time import bind
from .layer_pages import LayerPages


@op("ServedAttention", since=1, domain=OWN_DOMAIN)
def served_attention(
    node: Node,
    q: Value,
    row_starts: Value,
    past: Value,
    lengths: Value,
    most: Value,
    entries: Value,
    kv_cache: Value,
    kv_cache_scale: Value | None = None,
    bias: Value | None = None,
    sink: Value | None = None,
) -> Value:
    """Y like q, of layer `layer`.

    q [1, Hq, N, D]; the tables are those of PackedRequests, and of PackedSources for keys of sources. kv_cache [blocks,
    layers, 2, Hkv, tokens, D], int8 with float32 kv_cache_scale [blocks, layers, 2, Hkv, tokens, groups]. If is_causal
    is 1 a token sees its own key, the last of the keys for the last row, and left_window_size keys before, all if that
    is -1; if it is 0, all keys of its request. bias, float32 [heads or 1, ...], is added to scores, bias_by "key",
    "distance" or "pair" of positions below `context`. sink is [Hq].
    """
    rows, q_heads = q.shape[2], number(node, "dimension 1 of q", q.shape[1])
    heads, size = (number(node, f"dimension {axis} of kv_cache", kv_cache.shape[axis]) for axis in (3, 5))
    left, pages = node.attr("left_window_size"), LayerPages(node, entries, kv_cache, kv_cache_scale)
    most_rows, most_keys = bind(node, most)
    change, read = _change(node, bias, past)
    problem = packed(
        past.shape[0],
        (q_heads, heads),
        size,
        q.dtype,
        pages.layout,
        "htd",
        scale=node.attr("scale"),
        softcap=node.attr("softcap"),
        window=Window(None if left < 0 else left, 0, "lengths") if node.attr("is_causal") else None,
        score=change,
        sink=sink is not None,
    )
    given: dict[str, Value | Size] = {"q": node.reshaped(q, (q_heads, rows, size)), **pages.tensors}
    if sink is not None:
        given["sink"] = asserted(node, sink, (q_heads,))
    given |= {"row_starts": row_starts, "lengths": lengths, "most_rows": most_rows, "most_keys": most_keys}
    y = solved(node, problem, {**given, **read}, most_keys)["y"]
    return node.reshaped(y, q.shape)


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
