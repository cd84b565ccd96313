"""Matmuls of matrices of bytes: ONNX MatMulInteger and QLinearMatMul.

Accumulators are exact in int32, modulo 2^32, as in ONNX. The first matrix is converted to unsigned bytes and the second
to signed bytes, with zero points to match: machines multiply these types. Zero points are subtracted from the
accumulators:

    sum (a - za) (b - zb) = sum a b - za (sum b - K zb) - zb sum a
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...importing.node import Node
from ...importing.values import Size, Value, is_one
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.compute import pointwise, relax_call
from ..helpers.requirements import require_dtype
from ..tensor.cast import cast_to
from ..tensor.reshape import reshape_to
from .matmul import emit_matmul
from .quantization import quantize_values

BYTES = ("uint8", "int8")
_SIGN_OFFSET = 128  # between the values of an unsigned and a signed byte


@op("MatMulInteger", since=10)
def matmul_integer(node: Node, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None) -> Value:
    """Emit the int32 matmul.

    https://onnx.ai/onnx/operators/onnx__MatMulInteger.html. Zero points are per tensor, per row of A or per column of
    B.
    """
    return integer_matmul(node, a, b, a_zero, b_zero)


@op("QLinearMatMul", since=10)
def qlinear_matmul(
    node: Node,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    y_scale: Value,
    y_zero: Value,
) -> Value:
    """Emit the matmul over y_scale, rounded to nearest even, plus y_zero, saturated.

    https://onnx.ai/onnx/operators/onnx__QLinearMatMul.html
    """
    scales = (
        broadcast_row_scale(node, a_scale, a, b),
        broadcast_column_scale(node, b_scale, b),
        broadcast_row_scale(node, y_scale, a, b),
    )
    return requantize(
        node, integer_matmul(node, a, b, a_zero, b_zero), *scales, broadcast_row_scale(node, y_zero, a, b)
    )


def requantize(node: Node, accumulators: Value, a_scale: Value, b_scale: Value, y_scale: Value, y_zero: Value) -> Value:
    """Convert int32 accumulators in units of a_scale b_scale to bytes in units of y_scale.

    The bytes have the type of y_zero. Scales have any float type. All four broadcast to the accumulators [...].
    """
    scales = [cast_to(node, scale, "float32") for scale in (a_scale, b_scale, y_scale)]
    factor = pointwise(node, lambda a, b, y: a * b / y, *scales, name="scale")
    return quantize_values(
        node, relax_call(node, relax.op.multiply, cast_to(node, accumulators, "float32"), factor), y_zero, y_zero.dtype
    )


def integer_matmul(node: Node, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> Value:
    """Emit sum over k of (a - a_zero) (b - b_zero), int32 modulo 2^32.

    It is numpy.matmul of A [..., M, K] and B [..., K, N], each uint8 or int8. A zero point has the type of its matrix.
    It is per tensor, or per row [M] or column [N].

    Raises:
        NodeError: Another type, or shapes that do not fit.
    """
    for name, value in (("A", a), ("B", b)):
        require_dtype(node, name, value, BYTES)
    if a.rank == 1 or b.rank == 1:  # a vector is a matrix of one row or column
        is_row, is_column = a.rank == 1, b.rank == 1
        a_zero = None if a_zero is None else broadcast_scale(node, a_zero, a.shape[-2] if a.rank > 1 else None)
        b_zero = None if b_zero is None else broadcast_scale(node, b_zero, b.shape[-1] if b.rank > 1 else None)
        a = reshape_to(node, a, (1, *a.shape)) if is_row else a
        b = reshape_to(node, b, (*b.shape, 1)) if is_column else b
        y = integer_matmul(node, a, b, a_zero, b_zero)
        result_shape = [
            n for k, n in enumerate(y.shape) if not (is_row and k == y.rank - 2) and not (is_column and k == y.rank - 1)
        ]
        return reshape_to(node, y, tuple(result_shape))
    a_zero = None if a_zero is None else broadcast_row_scale(node, a_zero, a, b)
    b_zero = None if b_zero is None else broadcast_column_scale(node, b_zero, b)
    a, a_zero = _convert_sign(node, a, a_zero, "uint8")
    b, b_zero = _convert_sign(node, b, b_zero, "int8")
    y = emit_matmul(node, a, b, "int32")
    if a_zero is not None:
        byte_totals = _accumulate_bytes(node, b, b.rank - 2)
        if b_zero is not None:
            depth = cast_to(node, reshape_to(node, node.sizes([a.shape[-1]]), ()), "int32")
            byte_totals = relax_call(
                node, relax.op.subtract, byte_totals, relax_call(node, relax.op.multiply, b_zero, depth)
            )
        y = relax_call(node, relax.op.subtract, y, relax_call(node, relax.op.multiply, byte_totals, a_zero))
    if b_zero is not None:
        byte_totals = _accumulate_bytes(node, a, a.rank - 1)
        y = relax_call(node, relax.op.subtract, y, relax_call(node, relax.op.multiply, byte_totals, b_zero))
    return y


def _convert_sign(node: Node, x: Value, zero: Value | None, dtype: str) -> tuple[Value, Value | None]:
    """Return unsigned or signed bytes that represent the same numbers, and their int32 zero point.

    A zero point of 0 is None.
    """
    shift = 0 if x.dtype == dtype else _SIGN_OFFSET if dtype == "uint8" else -_SIGN_OFFSET
    constant = np.array(0) if zero is None else zero.constant
    if constant is not None:
        shifted = constant.astype(np.int32) + np.int32(shift)
        zero_point = node.constant(shifted) if shifted.any() else None
    else:
        assert zero is not None
        wide = cast_to(node, zero, "int32")
        zero_point = relax_call(node, relax.op.add, wide, node.constant(np.array(shift, np.int32))) if shift else wide
    if not shift:
        return x, zero_point
    if x.constant is not None:
        return node.constant((x.constant.astype(np.int32) + shift).astype(dtype)), zero_point
    return pointwise(node, lambda x: x.astype("int32") + shift, x, dtype=dtype, name="shifted"), zero_point


def broadcast_scale(node: Node, value: Value, size: Size | None = None, has_column_axis: bool = False) -> Value:
    """Return a scale or zero point in a shape that broadcasts.

    One per tensor is a scalar. A vector is proved or asserted at run time to have `size` elements, followed by a
    unit axis if has_column_axis.

    Raises:
        NodeError: It is a vector, and size is None.
    """
    if value.rank == 1 and is_one(value.shape[0]):
        return reshape_to(node, value, ())
    if value.rank != 1:
        return value
    if size is None:
        raise node.error(
            "node.scale_not_scalar",
            f"{node.describe(value, False)} is a vector of {value.shape[0]} elements.",
            "Give it one element.",
        )
    value = assert_shape(node, value, (size,))
    return reshape_to(node, value, (size, 1)) if has_column_axis else value


def broadcast_row_scale(node: Node, value: Value, a: Value, b: Value) -> Value:
    """Return a scale or zero point of the first matrix."""
    return broadcast_scale(node, value, a.shape[-2] if a.rank > 1 else None, has_column_axis=b.rank > 1)


def broadcast_column_scale(node: Node, value: Value, b: Value) -> Value:
    """Return a scale or zero point of the second matrix."""
    return broadcast_scale(node, value, b.shape[-1] if b.rank > 1 else None)


def _accumulate_bytes(node: Node, x: Value, axis: int) -> Value:
    """Accumulate bytes along an axis in int32; the axis stays with size 1."""
    if x.constant is not None:
        return node.constant(x.constant.sum(axis, dtype=np.int32, keepdims=True))
    return node.emit(relax.op.sum(node.tensor(cast_to(node, x, "int32")), axis=[axis], keepdims=True), "int32")
