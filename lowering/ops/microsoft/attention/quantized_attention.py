"""com.microsoft QAttention: Attention with quantized input and weights, as written by onnxruntime's quantizer."""

from __future__ import annotations

from ....importing.node import Node
from ....importing.values import Value
from ... import op
from ...math.integer_matmul import broadcast_scale, integer_matmul
from ...math.matmul import round_to
from ...tensor.cast import cast_to
from .. import DOMAIN
from ..quantized import rescale
from .attention import emit_attention, read_widths
from .projections import check_floats, check_packed_bias


@op("QAttention", since=1, domain=DOMAIN)
def q_attention(
    node: Node,
    x: Value,
    weights: Value,
    bias: Value,
    x_scale: Value,
    weight_scale: Value,
    mask_index: Value | None = None,
    x_zero: Value | None = None,
    weight_zero: Value | None = None,
    past: Value | None = None,
) -> tuple[Value, Value | None]:
    """Return Y [B, S, H * D] and present [2, B, H, T, D], for x [B, S, E] and weights [E, 3 H * D], uint8 or int8.

    x has one scale and zero point for the tensor; weights may have one for each column. The projections are exact
    integer accumulators, times both scales, plus the bias. All further computation is in the type of the bias.
    """
    check_floats(node, bias=bias, input_scale=x_scale, weight_scale=weight_scale, past=past)
    widths = read_widths(node, x, weights)
    x_scale, weight_scale, wide = (cast_to(node, v, "float32") for v in (x_scale, weight_scale, bias))
    x_zero = None if x_zero is None else broadcast_scale(node, x_zero)
    accumulators = integer_matmul(node, x, weights, x_zero, weight_zero)
    wide = check_packed_bias(node, wide, sum(widths))
    qkv = rescale(node, accumulators, x, weights, (broadcast_scale(node, x_scale), weight_scale), wide)
    return emit_attention(node, round_to(node, qkv, bias.dtype), widths, mask_index, past, None)
