"""com.microsoft QAttention: Attention whose input and weights are bytes, as the quantizer of onnxruntime writes it."""

from __future__ import annotations

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..cast import cast_to
from ..integer_matmul import along, integer_matmul
from ..matmul import rounded
from . import DOMAIN
from .attention import attended, projected_widths
from .projections import check_floats, packed_bias
from .quantized import scaled


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
    """Y [B, S, H * D], present [2, B, H, T, D], of x [B, S, E] and weights [E, 3 H * D], each uint8 or int8.

    The scale and zero point of x are those of the tensor, of the weights there may be one for each column. The
    projections are exact sums, times both scales, plus the bias; from there on all is in the type of the bias.
    """
    check_floats(node, bias=bias, input_scale=x_scale, weight_scale=weight_scale, past=past)
    widths = projected_widths(node, x, weights)
    x_scale, weight_scale, wide = (cast_to(node, v, "float32") for v in (x_scale, weight_scale, bias))
    x_zero = None if x_zero is None else along(node, x_zero)
    sums = integer_matmul(node, x, weights, x_zero, weight_zero)
    wide = packed_bias(node, wide, sum(widths))
    qkv = scaled(node, sums, x, weights, (along(node, x_scale), weight_scale), wide)
    return attended(node, rounded(node, qkv, bias.dtype), widths, mask_index, past, None)
