"""com.microsoft Attention: projection of one input to Q, K and V by one weight, then attention."""

from __future__ import annotations

import math

from tvm import relax

from ....attention.record.problem import Window
from ....importing.node import Node
from ....importing.values import Value
from ... import op
from ...attention.attend import concatenate_cache, describe_mask, lower_attention, move_heads_first
from ...helpers.assertions import assert_shape
from ...helpers.compute import number, relax_call
from ...helpers.kernels import compute
from ...helpers.requirements import reject_attribute, reject_input, require_rank
from ...math.matmul import emit_matmul, round_to
from .. import DOMAIN
from .masks import PaddingMask, ScoreMatrix, add_biases, read_filter_value, read_padding
from .projections import check_floats, check_packed_bias, divide_heads, slice_projection

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
    """Return Y [B, S, H * Dv] and present [2, B, H, T, D].

    x is [B, S, E], weights [E, H * (2 D + Dv)] and past [2, B, H, P, D].
    """
    reject_input(node, "past_sequence_length", past_sequence_length, "Export with a growing cache.")
    check_floats(node, input=x, weights=weights, bias=bias, past=past)
    widths = read_widths(node, x, weights)
    qkv = emit_matmul(node, x, weights)
    if bias is not None:
        bias = check_packed_bias(node, bias, sum(widths))
        qkv = relax_call(node, relax.op.add, qkv, round_to(node, bias, qkv.dtype))
    return emit_attention(node, round_to(node, qkv, x.dtype), widths, mask_index, past, attention_bias)


def emit_attention(
    node: Node, qkv: Value, widths: Widths, mask_index: Value | None, past: Value | None, attention_bias: Value | None
) -> tuple[Value, Value | None]:
    """Return Y and present of the node, for the projections qkv [B, S, sum of widths]."""
    heads, (batch, rows, _) = node.attr("num_heads"), qkv.shape
    q, k, v = (slice_projection(node, qkv, sum(widths[:n]), widths[n]) for n in range(3))
    if (past is not None or node.has_output(1)) and widths[1] != widths[2]:
        raise node.error(
            "attention.cache_widths_mismatch",
            f"attribute qkv_hidden_sizes is {list(widths)}.",
            "Make the widths of K and V equal, as a cache requires.",
        )
    past_length = 0
    if past is not None:
        require_rank(node, "past", past, "[2, batch, heads, length, head size]")
        past_length = past.shape[3]
        past = assert_shape(node, past, (2, batch, heads, past_length, widths[1] // heads))
        k, v = (
            concatenate_cache(node, _slice_past(node, past, n), move_heads_first(node, new, heads))
            for n, new in ((0, k), (1, v))
        )
    elif node.has_output(1):
        k, v = move_heads_first(node, k, heads), move_heads_first(node, v, heads)
    scores = ScoreMatrix(batch, heads, rows, node.simplify(past_length + rows), read_filter_value(node))
    mask = PaddingMask() if mask_index is None else read_padding(node, "mask_index", mask_index, scores)
    bias = add_biases(node, scores, attention_bias, mask.bias)
    results = lower_attention(
        node,
        {"q": q, "k": k, "v": v, "mask": bias, "lengths": mask.lengths, "past": past_length},
        heads=(heads, heads),
        acc_dtype="float64" if qkv.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(widths[0] // heads),
        window=Window(right=0, offset="zero" if past is None else "past") if node.attr("unidirectional", 0) else None,
        mask=describe_mask(bias),
    )
    return results["y"], _stack_present(node, k, v) if node.has_output(1) else None


def read_widths(node: Node, x: Value, weights: Value) -> Widths:
    """Return the widths of Q, K and V for x [B, S, E] and weights [E, their sum].

    Raises:
        NodeError: the node has an unsupported attribute or shape.
    """
    reject_attribute(node, "past_present_share_buffer", 0, "Export with a growing cache.")
    reject_attribute(node, "do_rotary", 0, "Use MultiHeadAttention after RotaryEmbedding.")
    require_rank(node, "input", x, "[batch, sequence, input hidden]")
    require_rank(node, "weights", weights, "[input hidden, hidden + hidden + v_hidden]")
    heads = node.attr("num_heads")
    total = number(node, "last dimension of weights", weights.shape[1])
    sizes = node.attr("qkv_hidden_sizes", None) or [total // 3] * 3
    if len(sizes) != 3 or sum(sizes) != total or sizes[0] != sizes[1]:
        raise node.error(
            "attention.hidden_sizes_mismatch",
            f"attribute qkv_hidden_sizes is {sizes}, for weights of {total} columns.",
            "Give three widths that add up to the columns, with the same width for Q and K.",
        )
    for size in sizes:
        divide_heads(node, "a projection", size, heads)
    return sizes[0], sizes[1], sizes[2]


def _slice_past(node: Node, past: Value, n: int) -> Value:
    """Return keys or values of a cache that has both."""
    return compute(node, "past", lambda i, x: x(n, *i), [past], past.shape[1:])


def _stack_present(node: Node, k: Value, v: Value) -> Value:
    """Return k and v, stacked along a new first axis."""
    expanded = [relax.op.expand_dims(node.tensor(x), 0) for x in (k, v)]
    return node.emit(relax.op.concat([node.emit(x).expr for x in expanded], axis=0))
