"""com.microsoft operators of bytes: sums and functions of dequantized numbers, and matmuls with their scales.

Each is what its ai.onnx parts are: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx

from ...importing.channels import channels_last, channels_second
from ...importing.compute import pointwise, relax_call
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..activation import softmax_over
from ..cast import cast_to
from ..contents import static_axis
from ..integer_matmul import along, integer_matmul, of_columns, of_rows
from ..matmul import permuted
from ..movement import concat, where
from ..pooling import averaged, global_average_pool
from ..quantization import dynamically_quantized, quantized
from . import DOMAIN


def dequantized(node: Node, x: Value, scale: Value, zero: Value | None) -> Value:
    """(x - zero) scale, float32."""
    number, scale = cast_to(node, x, "float32"), along(node, scale)
    if zero is not None:
        zero = cast_to(node, along(node, zero), "float32")
        number = relax_call(node, relax.op.subtract, number, zero)
    return relax_call(node, relax.op.multiply, number, scale)


def _bytes(node: Node, numbers: Value, scale: Value, zero: Value | None, dtype: str) -> Value:
    """The numbers over the scale as integers of that type, which is that of the zero point if there is one."""
    over = relax_call(node, relax.op.divide, numbers, along(node, scale))
    return quantized(node, over, None if zero is None else along(node, zero), dtype)


_BINARY = {"QLinearAdd": relax.op.add, "QLinearMul": relax.op.multiply}


@op("QLinearMul", since=1, domain=DOMAIN)
@op("QLinearAdd", since=1, domain=DOMAIN)
def binary(
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
    """Of the dequantized numbers, which broadcast; C is of the type of A, uint8 or int8."""
    numbers = dequantized(node, a, a_scale, a_zero), dequantized(node, b, b_scale, b_zero)
    return _bytes(node, relax_call(node, _BINARY[node.op_type], *numbers), c_scale, c_zero, a.dtype)


@op("QLinearSigmoid", since=1, domain=DOMAIN)
def qlinear_sigmoid(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    y = pointwise(node, tirx.sigmoid, dequantized(node, x, x_scale, x_zero), name="sigmoid")
    return _bytes(node, y, y_scale, y_zero, x.dtype)


@op("QLinearLeakyRelu", since=1, domain=DOMAIN)
def qlinear_leaky_relu(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    alpha = node.attr("alpha", 0.01)

    def leaky_relu(x: Any) -> Any:
        return tirx.Select(x >= tirx.const(0.0, "float32"), x, x * tirx.const(alpha, "float32"))

    y = pointwise(node, leaky_relu, dequantized(node, x, x_scale, x_zero), name="leaky_relu")
    return _bytes(node, y, y_scale, y_zero, x.dtype)


@op("QLinearSoftmax", since=1, domain=DOMAIN)
def qlinear_softmax(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    """Along an axis; of models below opset 13, along it and all behind it."""
    axis = static_axis(node, node.attr("axis", -1), x.rank)
    axes = [axis] if node.attr("opset", 13) >= 13 else list(range(axis, x.rank))
    return _bytes(node, softmax_over(node, dequantized(node, x, x_scale, x_zero), axes), y_scale, y_zero, x.dtype)


@op("QLinearConcat", since=1, domain=DOMAIN)
def qlinear_concat(node: Node, y_scale: Value, y_zero: Value, *parts: Value) -> Value:
    """Of parts that are three inputs each: bytes, scale and zero point."""
    if len(parts) % 3:
        raise node.error(
            f"{len(parts)} inputs are behind Y_zero_point.", "Give each part with its scale and zero point."
        )
    numbers = [dequantized(node, *parts[n : n + 3]) for n in range(0, len(parts), 3)]
    return _bytes(node, concat(node, *numbers), y_scale, y_zero, y_zero.dtype)


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
    numbers = dequantized(node, x, x_scale, x_zero), dequantized(node, y, y_scale, y_zero)
    return _bytes(node, where(node, condition, *numbers), z_scale, z_zero, x.dtype)


@op("QLinearAveragePool", since=1, domain=DOMAIN)
@op("QLinearGlobalAveragePool", since=1, domain=DOMAIN)
def qlinear_pool(
    node: Node, x: Value, x_scale: Value, x_zero: Value | None, y_scale: Value, y_zero: Value | None = None
) -> Value:
    """Of X [N, C, D1, ...], or [N, D1, ..., C] where channels_last is set. onnxruntime divides by all elements of a
    window where count_include_pad is set."""
    if x.rank < 3:
        raise node.error(f"X has rank {x.rank}.", "X is [N, C, D1, ...].")
    last = node.attr("channels_last", 0)
    numbers = dequantized(node, x, x_scale, x_zero)
    numbers = channels_second(node, numbers) if last else numbers
    if node.op_type == "QLinearGlobalAveragePool":
        y = global_average_pool(node, numbers)
    else:
        y = averaged(node, numbers, by_all=bool(node.attr("count_include_pad", 0)))
    return _bytes(node, channels_last(node, y) if last else y, y_scale, y_zero, x.dtype)


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
    """MatMulInteger times both scales, plus the bias."""
    return scaled(node, integer_matmul(node, a, b, a_zero, b_zero), a, b, (a_scale, b_scale), bias)


@op("DynamicQuantizeMatMul", since=1, domain=DOMAIN)
def dynamic_quantize_matmul(
    node: Node, a: Value, b: Value, b_scale: Value, b_zero: Value | None = None, bias: Value | None = None
) -> Value:
    """DynamicQuantizeLinear of A, and MatMulIntegerToFloat."""
    codes, scale, zero = dynamically_quantized(node, a)
    return scaled(node, integer_matmul(node, codes, b, zero, b_zero), a, b, (scale, b_scale), bias)


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
    """alpha times the product of numbers, to which C is added in units of alpha a_scale b_scale; bytes where there is
    y_scale, else float32."""
    if a.rank != 2 or b.rank != 2:
        raise node.error(f"A and B have ranks {a.rank} and {b.rank}.", "QGemm takes matrices.")
    a = permuted(node, a, [1, 0]) if node.attr("transA", 0) else a
    if node.attr("transB", 0):
        b = permuted(node, b, [1, 0]) if b.constant is None else node.constant(b.constant.T)
    sums = integer_matmul(node, a, b, a_zero, b_zero)
    if c is not None:
        sums = relax_call(node, relax.op.add, sums, c)
    y = scaled(node, sums, a, b, (a_scale, b_scale), None, node.attr("alpha", 1.0))
    return y if y_scale is None else _bytes(node, y, y_scale, y_zero, a.dtype)


def scaled(
    node: Node, sums: Value, a: Value, b: Value, scales: tuple[Value, Value], bias: Value | None, alpha: float = 1.0
) -> Value:
    """Sums of bytes as float32: times alpha and both scales, plus the bias."""
    row, column = of_rows(node, scales[0], a, b), of_columns(node, scales[1], b)
    factor = pointwise(node, lambda a, b: a * b * tirx.const(alpha, "float32"), row, column, name="scale")
    y = relax_call(node, relax.op.multiply, cast_to(node, sums, "float32"), factor)
    return y if bias is None else relax_call(node, relax.op.add, y, bias)
