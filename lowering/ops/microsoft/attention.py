"""com.microsoft Attention: the projection of one input to Q, K and V by one weight, and attention over the result."""

from __future__ import annotations

import math

from tvm import relax

from ...attention.problem import Window
from ...importing.compute import number, relax_call
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..asserted import asserted
from ..attend import attend, concatenated, heads_first, mask_of
from ..kernels import compute
from ..matmul import emit_matmul, rounded
from . import DOMAIN
from .masks import Padding, Scores, biased, filter_value, padding
from .projections import check_floats, head_size, packed_bias, part

Widths = tuple[int, int, int]


@op("Attention", since=1, domain=DOMAIN)
def attention(
    node: Node,
    x: Value,
    weights: Value,
    bias: Value | None = None,
    mask_index: Value | None = None,
    past: Value | None = None,
    attention_bias: Value | None = None,
    past_sequence_length: Value | None = None,
) -> tuple[Value, Value | None]:
    """Y [B, S, H * Dv], present [2, B, H, T, D], of x [B, S, E], weights [E, H * (2 D + Dv)], past [2, B, H, P, D]."""
    if past_sequence_length is not None:
        raise node.error("input past_sequence_length is given.", "Export with a growing cache.")
    check_floats(node, input=x, weights=weights, bias=bias, past=past)
    widths = projected_widths(node, x, weights)
    qkv = emit_matmul(node, x, weights)
    if bias is not None:
        bias = packed_bias(node, bias, sum(widths))
        qkv = relax_call(node, relax.op.add, qkv, rounded(node, bias, qkv.dtype))
    return attended(node, rounded(node, qkv, x.dtype), widths, mask_index, past, attention_bias)


def attended(
    node: Node, qkv: Value, widths: Widths, mask_index: Value | None, past: Value | None, attention_bias: Value | None
) -> tuple[Value, Value | None]:
    """Y and present of the node, for the projections qkv [B, S, sum of widths]."""
    heads, (batch, rows, _) = node.attr("num_heads"), qkv.shape
    q, k, v = (part(node, qkv, sum(widths[:n]), widths[n]) for n in range(3))
    if (past is not None or node.wants(1)) and widths[1] != widths[2]:
        raise node.error(f"attribute qkv_hidden_sizes is {list(widths)}.", "A cache needs K and V of one width.")
    before = 0
    if past is not None:
        if past.rank != 5:
            raise node.error(f"input past has rank {past.rank}.", "Make it [2, batch, heads, length, head size].")
        before = past.shape[3]
        past = asserted(node, past, (2, batch, heads, before, widths[1] // heads))
        k, v = (concatenated(node, _half(node, past, n), heads_first(node, new, heads)) for n, new in ((0, k), (1, v)))
    elif node.wants(1):
        k, v = heads_first(node, k, heads), heads_first(node, v, heads)
    scores = Scores(batch, heads, rows, node.simplify(before + rows), filter_value(node))
    mask = Padding() if mask_index is None else padding(node, "mask_index", mask_index, scores)
    bias = biased(node, scores, attention_bias, mask.bias)
    results = attend(
        node,
        {"q": q, "k": k, "v": v, "mask": bias, "lengths": mask.lengths, "past": before},
        heads=(heads, heads),
        acc_dtype="float64" if qkv.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(widths[0] // heads),
        window=Window(right=0, offset="zero" if past is None else "past") if node.attr("unidirectional", 0) else None,
        mask=mask_of(bias),
    )
    return results["y"], _stacked(node, k, v) if node.wants(1) else None


def projected_widths(node: Node, x: Value, weights: Value) -> Widths:
    """The widths of Q, K and V that x [B, S, E] and weights [E, their sum] make. Raises NodeError where the node asks
    for what is not lowered."""
    if node.attr("past_present_share_buffer", 0):
        raise node.error("attribute past_present_share_buffer is 1.", "Export with a growing cache.")
    if node.attr("do_rotary", 0):
        raise node.error("attribute do_rotary is 1.", "Use MultiHeadAttention behind RotaryEmbedding.")
    if x.rank != 3 or weights.rank != 2:
        raise node.error(f"input and weights have ranks {x.rank} and {weights.rank}.", "They have 3 and 2.")
    heads = node.attr("num_heads")
    total = number(node, "last dimension of weights", weights.shape[1])
    sizes = node.attr("qkv_hidden_sizes", None) or [total // 3] * 3
    if len(sizes) != 3 or sum(sizes) != total or sizes[0] != sizes[1]:
        raise node.error(
            f"attribute qkv_hidden_sizes is {sizes}, for weights of {total} columns.", "Q and K are equally wide."
        )
    for size in sizes:
        head_size(node, "a projection", size, heads)
    return sizes[0], sizes[1], sizes[2]


def _half(node: Node, past: Value, n: int) -> Value:
    """Keys or values of a cache for both."""
    return compute(node, "past", lambda i, x: x(n, *i), [past], past.shape[1:])


def _stacked(node: Node, k: Value, v: Value) -> Value:
    both = [relax.op.expand_dims(node.tensor(x), 0) for x in (k, v)]
    return node.emit(relax.op.concat([node.emit(x).expr for x in both], axis=0))
