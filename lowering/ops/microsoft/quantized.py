"""Quantized com.microsoft operators: element-wise functions of dequantized values, and integer matmuls with scales.

Each is composed of ai.onnx operators: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import pointwise, relax_call
from ..helpers.contents import normalize_axis
from ..helpers.requirements import require_rank
from ..math.activation import emit_softmax
from ..math.integer_matmul import broadcast_column_scale, broadcast_row_scale, broadcast_scale, integer_matmul
from ..math.matmul import permute_axes
from ..math.quantization import quantize_dynamically, quantize_values
from ..nn.pooling import average_windows, global_average_pool
from ..tensor.cast import cast_to
from ..tensor.concat import concat
from ..tensor.movement import where
from . import DOMAIN


def dequantize(node: Node, x: Value, scale: Value, zero: Value | None) -> Value:
    """Return (x - zero) scale, float32."""
    number, scale = cast_to(node, x, "float32"), broadcast_scale(node, scale)
    if zero is not None:
        zero = cast_to(node, broadcast_scale(node, zero), "float32")
        number = relax_call(node, relax.op.subtract, number, zero)
    return relax_call(node, relax.op.multiply, number, scale)


def _quantize(node: Node, numbers: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """Quantize numbers by the scale to integers of this type, which is that of the zero point if there is one."""
    scaled_numbers = relax_call(node, relax.op.divide, numbers, broadcast_scale(node, scale))
    return quantize_values(node, scaled_numbers, None if zero is None else broadcast_scale(node, zero), dtype)


_BINARY = {"QLinearAdd": relax.op.add, "QLinearMul": relax.op.multiply}


@op("QLinearMul", since=1, domain=DOMAIN)
@op("QLinearAdd", since=1, domain=DOMAIN)
def qlinear_binary(
    node: Node,
    a: Value,
    a_scale: Value,
    a_zero: Value | None,
    b: Value,
    b_scale: Value,
    b_zero: Value | None,
    c_scale: Value,
    c_zero: Value | None = None,
) -> Value:
    """Add or multiply the dequantized operands, which broadcast; C has the type of A, uint8 or int8."""
    numbers = dequantize(node, a, a_scale, a_zero), dequantize(node, b, b_scale, b_zero)
    return _quantize(node, relax_call(node, _BINARY[node.op_type], *numbers), c_scale, c_zero, a.dtype)


@op("QLinearSigmoid", since=1, domain=DOMAIN)
def qlinear_sigmoid(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    y = pointwise(node, tirx.sigmoid, dequantize(node, x, x_scale, x_zero), name="sigmoid")
    return _quantize(node, y, y_scale, y_zero, x.dtype)


@op("QLinearLeakyRelu", since=1, domain=DOMAIN)
def qlinear_leaky_relu(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    alpha = node.attr("alpha", 0.01)

    def leaky_relu(x: Any) -> Any:
        return tirx.Select(x >= tirx.const(0.0, "float32"), x, x * tirx.const(alpha, "float32"))

    y = pointwise(node, leaky_relu, dequantize(node, x, x_scale, x_zero), name="leaky_relu")
    return _quantize(node, y, y_scale, y_zero, x.dtype)


@op("QLinearSoftmax", since=1, domain=DOMAIN)
def qlinear_softmax(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    """Apply softmax along an axis; in models below opset 13, along it and all following axes."""
    axis = normalize_axis(node, node.attr("axis", -1), x.rank)
    axes = [axis] if node.attr("opset", 13) >= 13 else list(range(axis, x.rank))
    return _quantize(node, emit_softmax(node, dequantize(node, x, x_scale, x_zero), axes), y_scale, y_zero, x.dtype)


@op("QLinearConcat", since=1, domain=DOMAIN)
def qlinear_concat(node: Node, y_scale: Value, y_zero: Value, *triples: Value) -> Value:
    """Concatenate parts that are three inputs each: quantized values, scale and zero point."""
    if len(triples) % 3:
        raise node.error(
            "qlinear_concat.input_count_mismatch",
            f"{len(triples)} inputs follow Y_zero_point, not a multiple of 3.",
            "Give each tensor with its scale and zero point.",
        )
    numbers = [dequantize(node, *triples[n : n + 3]) for n in range(0, len(triples), 3)]
    return _quantize(node, concat(node, *numbers), y_scale, y_zero, y_zero.dtype)


@op("QLinearWhere", since=1, domain=DOMAIN)
def qlinear_where(
    node: Node,
    condition: Value,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    y: Value,
    y_scale: Value,
    y_zero: Value,
    z_scale: Value,
    z_zero: Value,
) -> Value:
    numbers = dequantize(node, x, x_scale, x_zero), dequantize(node, y, y_scale, y_zero)
    return _quantize(node, where(node, condition, *numbers), z_scale, z_zero, x.dtype)


@op("QLinearAveragePool", since=1, domain=DOMAIN)
@op("QLinearGlobalAveragePool", since=1, domain=DOMAIN)
def qlinear_pool(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    """Pool X [N, C, D1, ...], or [N, D1, ..., C] if channels_last is set.

    If count_include_pad is set, onnxruntime divides by all elements of a window.
    """
    require_rank(node, "X", x, "[N, C, D1, ...]")
    has_channels_last = node.attr("channels_last", 0)
    numbers = dequantize(node, x, x_scale, x_zero)
    numbers = channels_second(node, numbers) if has_channels_last else numbers
    if node.op_type == "QLinearGlobalAveragePool":
        y = global_average_pool(node, numbers)
    else:
        y = average_windows(node, numbers, by_all=bool(node.attr("count_include_pad", 0)))
    return _quantize(node, channels_last(node, y) if has_channels_last else y, y_scale, y_zero, x.dtype)


@op("MatMulIntegerToFloat", since=1, domain=DOMAIN)
def matmul_integer_to_float(
    node: Node,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero: Value | None = None,
    b_zero: Value | None = None,
    bias: Value | None = None,
) -> Value:
    """Return MatMulInteger times both scales, plus the bias."""
    return rescale(node, integer_matmul(node, a, b, a_zero, b_zero), a, b, (a_scale, b_scale), bias)


@op("DynamicQuantizeMatMul", since=1, domain=DOMAIN)
def dynamic_quantize_matmul(
    node: Node, a: Value, b: Value, b_scale: Value, b_zero: Value | None = None, bias: Value | None = None
) -> Value:
    """Apply DynamicQuantizeLinear to A, then MatMulIntegerToFloat."""
    quantized_a, scale, zero = quantize_dynamically(node, a)
    return rescale(node, integer_matmul(node, quantized_a, b, zero, b_zero), a, b, (scale, b_scale), bias)


@op("QGemm", since=1, domain=DOMAIN)
def qgemm(
    node: Node,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    c: Value | None = None,
    y_scale: Value | None = None,
    y_zero: Value | None = None,
) -> Value:
    """Return alpha times the matmul of dequantized operands, plus C in units of alpha a_scale b_scale.

    The result is quantized if y_scale is present, else float32.
    """
    require_rank(node, "A", a, "[M, K]")
    require_rank(node, "B", b, "[K, N]")
    a = permute_axes(node, a, [1, 0]) if node.attr("transA", 0) else a
    if node.attr("transB", 0):
        b = permute_axes(node, b, [1, 0]) if b.constant is None else node.constant(b.constant.T)
    accumulators = integer_matmul(node, a, b, a_zero, b_zero)
    if c is not None:
        accumulators = relax_call(node, relax.op.add, accumulators, c)
    y = rescale(node, accumulators, a, b, (a_scale, b_scale), None, node.attr("alpha", 1.0))
    return y if y_scale is None else _quantize(node, y, y_scale, y_zero, a.dtype)


def rescale(
    node: Node,
    accumulators: Value,
    a: Value,
    b: Value,
    scales: tuple[Value, Value],
    bias: Value | None,
    alpha: float = 1.0,
) -> Value:
    """Return integer accumulators as float32: times alpha and both scales, plus the bias."""
    row, column = broadcast_row_scale(node, scales[0], a, b), broadcast_column_scale(node, scales[1], b)
    factor = pointwise(node, lambda a, b: a * b * tirx.const(alpha, "float32"), row, column, name="scale")
    y = relax_call(node, relax.op.multiply, cast_to(node, accumulators, "float32"), factor)
    return y if bias is None else relax_call(node, relax.op.add, y, bias)
