"""ServedAttention: packed rows of requests attend to their keys in one layer of a paged cache."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ...attention.codegen.parameters import int64
from ...attention.record.formula import Formula
from ...attention.record.problem import Window
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..attention.attend import call_attention_kernel, make_ragged_problem, trace_formula
from ..helpers.assertions import assert_shape
from ..helpers.compute import number
from ..helpers.run_time import bind_sizes
from .layer_pages import LayerPages


@op("ServedAttention", since=1, domain=OWN_DOMAIN)
def served_attention(
    node: Node,
    q: Value,
    row_starts: Value,
    past: Value,
    lengths: Value,
    maxima: Value,
    entries: Value,
    kv_cache: Value,
    kv_cache_scale: Value | None = None,
    bias: Value | None = None,
    sink: Value | None = None,
) -> Value:
    """Return Y like q, for layer `layer`.

    q is [1, Hq, N, D]. The tables are those of PackedRequests, or of PackedSources for keys of sources. kv_cache is
    [blocks, layers, 2, Hkv, tokens, D], int8 with float32 kv_cache_scale [blocks, layers, 2, Hkv, tokens, groups].

    If is_causal is 1, a token sees its own key, which is the last key for the last row, and left_window_size keys
    before it, or all of them if left_window_size is -1. If is_causal is 0, it sees all keys of its request. bias,
    float32 [heads or 1, ...], is added to scores, indexed by the attribute bias_by: "key", "distance" or "pair" of
    positions below `context`. sink is [Hq].
    """
    rows, q_heads = q.shape[2], number(node, "dimension 1 of q", q.shape[1])
    heads, size = (number(node, f"dimension {axis} of kv_cache", kv_cache.shape[axis]) for axis in (3, 5))
    left, pages = node.attr("left_window_size"), LayerPages(node, entries, kv_cache, kv_cache_scale)
    max_rows, max_keys = bind_sizes(node, maxima)
    score, bias_arguments = _read_bias(node, bias, past)
    problem = make_ragged_problem(
        past.shape[0],
        (q_heads, heads),
        size,
        q.dtype,
        pages.layout,
        "htd",
        scale=node.attr("scale"),
        softcap=node.attr("softcap"),
        window=Window(None if left < 0 else left, 0, "lengths") if node.attr("is_causal") else None,
        score=score,
        sink=sink is not None,
    )
    arguments: dict[str, Value | Size] = {"q": node.reshape_to(q, (q_heads, rows, size)), **pages.tensors}
    if sink is not None:
        arguments["sink"] = assert_shape(node, sink, (q_heads,))
    arguments |= {"row_starts": row_starts, "lengths": lengths, "most_rows": max_rows, "most_keys": max_keys}
    y = call_attention_kernel(node, problem, {**arguments, **bias_arguments}, max_keys)["y"]
    return node.reshape_to(y, q.shape)


def _read_bias(node: Node, bias: Value | None, past: Value) -> tuple[Formula | None, dict[str, Any]]:
    """Return the bias that is added to scores as a formula, and the kernel's arguments for it."""
    if bias is None:
        return None, {}
    bias_by, last, is_shared = node.attr("bias_by"), int64(node.attr("context") - 1), bias.shape[0] == 1

    def element(b: Any, h: Any, i: Any, j: Any, s: Any, bias: Any, past: Any) -> Any:
        token, key = (tirx.max(tirx.min(x, last), int64(0)) for x in (past(b) + i, j))
        distance = tirx.max(tirx.min(past(b) + i - j, last), int64(0))
        bias_index = {"key": (key,), "distance": (distance,), "pair": (token, key)}[bias_by]
        return s + bias(int64(0) if is_shared else h, *bias_index)

    return trace_formula(element, [bias, past], "float32")
