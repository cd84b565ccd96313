"""Matmuls of dequantized bytes: matmuls of the bytes, whose sums are exact."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .matching import Rewrite, Size, array, attribute, dims, is_op, number, numbers, operand, producer
from .node_pass import NodePass

_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)
_MOST = 2**31 // 255**2
"""Matmuls of differences of bytes whose sum fits int32."""

_MOST_CODES = 2**30 // 255
"""What a row's codes may add up to, where the bytes that they are multiplied by are anything: half of what fits."""


class FuseIntegerMatmulsPass(NodePass):
    """Makes integer matmuls of float matmuls of which both operands are DequantizeLinear of bytes, one scale for the
    first and one for all or for each output of the second.

    1. MatMul: MatMulInteger, Cast, Mul by both scales.
    2. Gemm with alpha and beta 1, of A as it is: the same, and Add of C.
    3. Conv of one group by constant weights: ConvInteger, Cast, Mul, and Add of the bias.

    Blocks, scales in another type than float32, codes of other widths, a Gemm that turns a matrix that is computed, and
    sums of unknown length, or of so many that int32 may not hold them, refuse the match: those keep their floats. The
    length does not matter where A holds the codes of probabilities, which add up to little.
    """

    since = 10
    operators = ("MatMul", "Gemm", "Conv")

    def rewrite(self, node: ir.Node) -> bool:
        a, b = _codes(operand(node, 0)), _codes(operand(node, 1))
        if a is None or b is None or a.axis is not None:
            return False
        return {"MatMul": _matmul, "Gemm": _gemm, "Conv": _conv}[node.op_type](node, a, b)


@dataclass(frozen=True)
class _Codes:
    """What a DequantizeLinear makes floats of; scale and zero point are those of the tensor, or along `axis`."""

    node: ir.Node
    codes: ir.Value
    scale: ir.Value
    zero: ir.Value | None
    axis: int | None


def _codes(value: ir.Value) -> _Codes | None:
    node = producer(value, "DequantizeLinear")
    if node is None or attribute(node, "block_size", 0):
        return None
    codes, scale = operand(node, 0), operand(node, 1)
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if codes.dtype not in _BYTES or codes.shape is None or scale.dtype != ir.DataType.FLOAT or scale.shape is None:
        return None
    if value.dtype != ir.DataType.FLOAT or len(dims(scale)) > 1:
        return None
    several = len(dims(scale)) == 1 and dims(scale) != (1,)
    axis = int(attribute(node, "axis", 1)) % max(len(dims(codes)), 1) if several else None
    return _Codes(node, codes, scale, zero, axis)


def _matmul(node: ir.Node, a: _Codes, b: _Codes) -> bool:
    if b.axis not in (None, len(dims(b.codes)) - 1) or len(dims(b.codes)) < 2 or len(dims(a.codes)) < 1:
        return False
    if not _fits(dims(b.codes)[-2:-1]) and not _sum_of_codes(a) <= _MOST_CODES:
        return False
    new, result = Rewrite(node), node.outputs[0]
    new.replace([node, a.node, b.node], result, _scaled(new, _sums(new, a, b, b.codes, result), a, b, result))
    return True


def _gemm(node: ir.Node, a: _Codes, b: _Codes) -> bool:
    turned = bool(attribute(node, "transB", 0))
    if attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0 or attribute(node, "beta", 1.0) != 1.0:
        return False
    if b.axis not in (None, 0 if turned else 1) or not _fits(dims(b.codes)[1 if turned else 0 :][:1]):
        return False
    new, result, matrix = Rewrite(node), node.outputs[0], b.codes
    if turned:
        known, dtype = array(b.codes), b.codes.dtype
        if known is None or dtype is None:
            return False
        matrix = new.constant(known.T, dtype)
    y = _scaled(new, _sums(new, a, b, matrix, result), a, b, result)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        y = new.emit("Add", [y, node.inputs[2]], shape=dims(result))
    new.replace([node, a.node, b.node], result, y)
    return True


def _conv(node: ir.Node, x: _Codes, w: _Codes) -> bool:
    if attribute(node, "group", 1) != 1 or w.axis not in (None, 0) or len(dims(w.codes)) < 3:
        return False
    if array(w.codes) is None or not _fits(dims(w.codes)[1:]):
        return False
    new, result = Rewrite(node), node.outputs[0]
    given = {name: each for name, each in node.attributes.items() if name != "group"}
    inputs = _operands(new, x, w, w.codes)
    sums = new.emit("ConvInteger", inputs, given, ir.DataType.INT32, dims(result))
    spatial = [1] * (len(dims(w.codes)) - 2)
    y = _scaled(new, sums, x, w, result, spatial if w.axis is not None else None)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = new.emit("Reshape", [node.inputs[2], new.integers(-1, *spatial)], shape=(dims(w.codes)[0], *spatial))
        y = new.emit("Add", [y, bias], shape=dims(result))
    new.replace([node, x.node, w.node], result, y)
    return True


def _fits(sizes: Iterable[Size]) -> bool:
    """Whether sums over such axes fit int32."""
    known = numbers(sizes)
    return known is not None and math.prod(known) <= _MOST


def _sum_of_codes(a: _Codes) -> float:
    """What the differences of a row's codes and their zero point add up to at most, whatever the length of the row:
    probabilities add up to 1, and a number that is not negative is at most doubled when it is rounded to an integer.
    Infinite where they are codes of anything else."""
    node, scale = producer(a.codes, "QuantizeLinear"), number(a.scale)
    if (
        node is None
        or not scale
        or scale < 0
        or operand(node, 1) is not a.scale
        or [*node.inputs, None][2] is not a.zero
    ):
        return math.inf
    return 2 * _sum_of_row(operand(node, 0)) / scale


def _sum_of_row(value: ir.Value) -> float:
    """The same of the numbers that a softmax leaves, also where they were rounded on the way, or NaN became 0."""
    node = producer(value, "Softmax", "Where", "DequantizeLinear")
    if node is None:
        return math.inf
    if is_op(node, "Softmax"):
        return 1.0 if attribute(node, "axis", None) in (-1, len(dims(value)) - 1) else math.inf
    if is_op(node, "Where"):
        guard, kept = producer(operand(node, 0), "IsNaN"), operand(node, 2)
        zero = guard is not None and guard.inputs[0] is kept and number(operand(node, 1)) == 0
        return _sum_of_row(kept) if zero else math.inf
    codes, scale = _codes(value), number(operand(node, 1))
    return _sum_of_codes(codes) * scale if codes is not None and scale else math.inf


def _operands(new: Rewrite, a: _Codes, b: _Codes, matrix: ir.Value) -> list[ir.Value | None]:
    """Codes and zero points, of which there are none or both."""
    zeros = [a.zero, b.zero]
    if zeros[0] is None and zeros[1] is None:
        return [a.codes, matrix]
    for n, codes in enumerate((a.codes, b.codes)):
        if zeros[n] is None:
            assert codes.dtype is not None
            zeros[n] = new.constant(np.array(0), codes.dtype)
    return [a.codes, matrix, *zeros]


def _sums(new: Rewrite, a: _Codes, b: _Codes, matrix: ir.Value, result: ir.Value) -> ir.Value:
    return new.emit("MatMulInteger", _operands(new, a, b, matrix), dtype=ir.DataType.INT32, shape=dims(result))


def _scaled(
    new: Rewrite, sums: ir.Value, a: _Codes, b: _Codes, result: ir.Value, spatial: list[int] | None = None
) -> ir.Value:
    """The sums in float32, times both scales; spatial are axes of 1 behind that of b's."""
    scale = b.scale
    if spatial is not None:
        scale = new.emit("Reshape", [scale, new.integers(-1, *spatial)], shape=(dims(scale)[0], *spatial))
    shape = dims(scale) if dims(scale) else dims(a.scale)
    factor = new.emit("Mul", [a.scale, scale], shape=shape)
    return new.emit("Mul", [new.cast(sums, ir.DataType.FLOAT), factor], shape=dims(result))
