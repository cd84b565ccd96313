"""Matmuls of dequantized bytes as matmuls of the bytes, whose accumulators are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.matching import (
    Rewrite,
    Size,
    attribute,
    dims,
    is_op,
    operand,
    producer,
    read_array,
    read_number,
    read_static_sizes,
)
from ..node_pass import NodePass

_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_MAX_DEPTH = 2**31 // 255**2
"""Length of a dot product of differences of bytes whose accumulator fits int32."""

_MAX_ROW_SUM = 2**30 // 255
"""Maximum sum of the quantized values of a row if the other operand is any bytes: half of what fits."""


class FuseIntegerMatmulsPass(NodePass):
    """Rewrite of float matmuls of dequantized bytes as integer matmuls.

    Both operands are DequantizeLinear of bytes, with one scale for the first, and one for all or for each output of the
    second.

    1. MatMul: MatMulInteger, Cast, Mul by both scales.
    2. Gemm with alpha and beta 1, of A as it is: the same, and Add of C.
    3. Conv of one group by constant weights: ConvInteger, Cast, Mul, and Add of the bias.

    The match is rejected for blocks, scales of another type than float32, other widths, and a Gemm that transposes a
    computed matrix. It is also rejected for dot products of unknown length, or too long for int32 accumulators. These
    matmuls stay in float. The length does not matter if A contains quantized probabilities, which have a small sum.
    """

    since = 10
    operators = ("MatMul", "Gemm", "Conv")

    def rewrite(self, node: ir.Node) -> bool:
        a, b = _read_quantized(operand(node, 0)), _read_quantized(operand(node, 1))
        if a is None or b is None or a.axis is not None:
            return False
        return {"MatMul": _convert_matmul, "Gemm": _convert_gemm, "Conv": _convert_conv}[node.op_type](node, a, b)


@dataclass(frozen=True)
class _QuantizedOperand:
    """The operands of a DequantizeLinear; scale and zero point are per tensor, or along `axis`."""

    node: ir.Node
    quantized: ir.Value
    scale: ir.Value
    zero: ir.Value | None
    axis: int | None


def _read_quantized(value: ir.Value) -> _QuantizedOperand | None:
    node = producer(value, "DequantizeLinear")
    if node is None or attribute(node, "block_size", 0):
        return None
    quantized, scale = operand(node, 0), operand(node, 1)
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if (
        quantized.dtype not in _BYTES
        or quantized.shape is None
        or scale.dtype != ir.DataType.FLOAT
        or scale.shape is None
    ):
        return None
    if value.dtype != ir.DataType.FLOAT or len(dims(scale)) > 1:
        return None
    is_per_axis = len(dims(scale)) == 1 and dims(scale) != (1,)
    axis = int(attribute(node, "axis", 1)) % max(len(dims(quantized)), 1) if is_per_axis else None
    return _QuantizedOperand(node, quantized, scale, zero, axis)


def _convert_matmul(node: ir.Node, a: _QuantizedOperand, b: _QuantizedOperand) -> bool:
    if b.axis not in (None, len(dims(b.quantized)) - 1) or len(dims(b.quantized)) < 2 or len(dims(a.quantized)) < 1:
        return False
    if not _can_accumulate(dims(b.quantized)[-2:-1]) and not _bound_quantized_sum(a) <= _MAX_ROW_SUM:
        return False
    new, result = Rewrite(node), node.outputs[0]
    new.replace(
        [node, a.node, b.node],
        result,
        _emit_scaled(new, _emit_accumulators(new, a, b, b.quantized, result), a, b, result),
    )
    return True


def _convert_gemm(node: ir.Node, a: _QuantizedOperand, b: _QuantizedOperand) -> bool:
    is_transposed = bool(attribute(node, "transB", 0))
    if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
        return False
    if b.axis not in (None, 0 if is_transposed else 1) or not _can_accumulate(
        dims(b.quantized)[1 if is_transposed else 0 :][:1]
    ):
        return False
    new, result, matrix = Rewrite(node), node.outputs[0], b.quantized
    if is_transposed:
        elements, dtype = read_array(b.quantized), b.quantized.dtype
        if elements is None or dtype is None:
            return False
        matrix = new.emit_constant(elements.T, dtype)
    y = _emit_scaled(new, _emit_accumulators(new, a, b, matrix, result), a, b, result)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        y = new.emit("Add", [y, node.inputs[2]], shape=dims(result))
    new.replace([node, a.node, b.node], result, y)
    return True


def _convert_conv(node: ir.Node, x: _QuantizedOperand, w: _QuantizedOperand) -> bool:
    if attribute(node, "group", 1) != 1 or w.axis not in (None, 0) or len(dims(w.quantized)) < 3:
        return False
    if read_array(w.quantized) is None or not _can_accumulate(dims(w.quantized)[1:]):
        return False
    new, result = Rewrite(node), node.outputs[0]
    attributes = {name: value for name, value in node.attributes.items() if name != "group"}
    inputs = _list_operands(new, x, w, w.quantized)
    accumulators = new.emit("ConvInteger", inputs, attributes, ir.DataType.INT32, dims(result))
    spatial = [1] * (len(dims(w.quantized)) - 2)
    y = _emit_scaled(new, accumulators, x, w, result, spatial if w.axis is not None else None)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = new.emit(
            "Reshape", [node.inputs[2], new.emit_integers(-1, *spatial)], shape=(dims(w.quantized)[0], *spatial)
        )
        y = new.emit("Add", [y, bias], shape=dims(result))
    new.replace([node, x.node, w.node], result, y)
    return True


def _can_accumulate(sizes: Iterable[Size]) -> bool:
    """Return whether accumulators over such axes fit int32."""
    static_sizes = read_static_sizes(sizes)
    return static_sizes is not None and math.prod(static_sizes) <= _MAX_DEPTH


def _bound_quantized_sum(a: _QuantizedOperand) -> float:
    """Return the maximum of the sum over a row of quantized values minus their zero point.

    It does not depend on the length of the row: probabilities have the sum 1, and rounding a number that is not
    negative to an integer at most doubles it. Infinite if the values do not quantize probabilities.
    """
    node, scale = producer(a.quantized, "QuantizeLinear"), read_number(a.scale)
    if (
        node is None
        or not scale
        or scale < 0
        or operand(node, 1) is not a.scale
        or [*node.inputs, None][2] is not a.zero
    ):
        return math.inf
    return 2 * _bound_row_sum(operand(node, 0)) / scale


def _bound_row_sum(value: ir.Value) -> float:
    """Return the maximum sum over a row of the results of a softmax.

    They may have been rounded since, or NaN replaced by 0.
    """
    node = producer(value, "Softmax", "Where", "DequantizeLinear")
    if node is None:
        return math.inf
    if is_op(node, "Softmax"):
        return 1.0 if attribute(node, "axis", None) in (-1, len(dims(value)) - 1) else math.inf
    if is_op(node, "Where"):
        guard, otherwise = producer(operand(node, 0), "IsNaN"), operand(node, 2)
        is_guard = guard is not None and guard.inputs[0] is otherwise and read_number(operand(node, 1)) == 0
        return _bound_row_sum(otherwise) if is_guard else math.inf
    operand_of_row, scale = _read_quantized(value), read_number(operand(node, 1))
    return _bound_quantized_sum(operand_of_row) * scale if operand_of_row is not None and scale else math.inf


def _list_operands(new: Rewrite, a: _QuantizedOperand, b: _QuantizedOperand, matrix: ir.Value) -> list[ir.Value | None]:
    """Return quantized values and zero points; the node has two zero points or none."""
    zeros = [a.zero, b.zero]
    if zeros[0] is None and zeros[1] is None:
        return [a.quantized, matrix]
    for n, quantized in enumerate((a.quantized, b.quantized)):
        if zeros[n] is None:
            assert quantized.dtype is not None
            zeros[n] = new.emit_constant(np.array(0), quantized.dtype)
    return [a.quantized, matrix, *zeros]


def _emit_accumulators(
    new: Rewrite, a: _QuantizedOperand, b: _QuantizedOperand, matrix: ir.Value, result: ir.Value
) -> ir.Value:
    return new.emit("MatMulInteger", _list_operands(new, a, b, matrix), dtype=ir.DataType.INT32, shape=dims(result))


def _emit_scaled(
    new: Rewrite,
    accumulators: ir.Value,
    a: _QuantizedOperand,
    b: _QuantizedOperand,
    result: ir.Value,
    spatial: list[int] | None = None,
) -> ir.Value:
    """Emit the accumulators in float32, times both scales; spatial are axes of 1 after that of b's."""
    scale = b.scale
    if spatial is not None:
        scale = new.emit("Reshape", [scale, new.emit_integers(-1, *spatial)], shape=(dims(scale)[0], *spatial))
    shape = dims(scale) if dims(scale) else dims(a.scale)
    factor = new.emit("Mul", [a.scale, scale], shape=shape)
    return new.emit("Mul", [new.emit_cast(accumulators, ir.DataType.FLOAT), factor], shape=dims(result))
