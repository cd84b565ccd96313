"""Products of matrices of bytes: ONNX MatMulInteger and QLinearMatMul.

Sums are exact in int32, as ONNX has them, modulo 2^32. The first matrix becomes one of unsigned bytes and the second
one of signed bytes, with zero points to match, which is what machines multiply; zero points are taken off the sums:

    sum (a - za) (b - zb) = sum a b - za (sum b - K zb) - zb sum a
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..importing.compute import pointwise, relax_call
from ..importing.node import Node
from ..importing.values import Value, is_one
from . import op
from .asserted import asserted
from .cast import cast_to
from .matmul import matrix_product
from .quantisation import quantised
from .reshape import reshape_to

BYTES = ("uint8", "int8")
_MIDDLE = 128  # between what a byte without and one with a sign stand for


@op("MatMulInteger", since=10)
def matmul_integer(node: Node, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None) -> Value:
    """https://onnx.ai/onnx/operators/onnx__MatMulInteger.html; zero points for the tensor, for rows of A or columns of
    B."""
    return integer_product(node, a, b, a_zero, b_zero)


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
    """The product's numbers over y_scale, rounded to nearest even, plus y_zero, saturated:
    https://onnx.ai/onnx/operators/onnx__QLinearMatMul.html"""
    sums = cast_to(node, integer_product(node, a, b, a_zero, b_zero), "float32")
    row, column, of_y = (
        along(node, v, a, of_rows) for v, of_rows in ((a_scale, True), (b_scale, False), (y_scale, True))
    )
    factors = [cast_to(node, v, "float32") for v in (row, column, of_y)]
    scale = pointwise(node, lambda a, b, y: a * b / y, *factors, name="scale")
    return quantised(node, relax_call(node, relax.op.multiply, sums, scale), along(node, y_zero, a, True), y_zero.dtype)


def integer_product(node: Node, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> Value:
    """sum over k of (a - a_zero) (b - b_zero), int32: numpy.matmul of bytes."""
    for name, value in (("A", a), ("B", b)):
        if value.dtype not in BYTES:
            raise node.error(f"{name} has type {value.dtype}.", "Give it bytes: uint8 or int8.")
    a_zero = None if a_zero is None else along(node, a_zero, a, of_rows=True)
    b_zero = None if b_zero is None else along(node, b_zero, a, of_rows=False)
    a, a_zero = _as_bytes(node, a, a_zero, "uint8")
    b, b_zero = _as_bytes(node, b, b_zero, "int8")
    y = matrix_product(node, a, b, "int32")
    if a_zero is not None:
        sums = _sums(node, b, -2, keep=a.rank > 1)
        if b_zero is not None:
            depth = cast_to(node, reshape_to(node, node.sizes([a.shape[-1]]), ()), "int32")
            sums = relax_call(node, relax.op.subtract, sums, relax_call(node, relax.op.multiply, b_zero, depth))
        y = relax_call(node, relax.op.subtract, y, relax_call(node, relax.op.multiply, sums, a_zero))
    if b_zero is not None:
        sums = _sums(node, a, -1, keep=b.rank > 1)
        y = relax_call(node, relax.op.subtract, y, relax_call(node, relax.op.multiply, sums, b_zero))
    return y


def _as_bytes(node: Node, x: Value, zero: Value | None, dtype: str) -> tuple[Value, Value | None]:
    """Bytes with or without a sign that stand for the same numbers, and their zero point in int32, None for 0."""
    shift = 0 if x.dtype == dtype else _MIDDLE if dtype == "uint8" else -_MIDDLE
    known = np.array(0) if zero is None else zero.constant
    if known is not None:
        moved = known.astype(np.int32) + np.int32(shift)
        at = node.constant(moved) if moved.any() else None
    else:
        assert zero is not None
        wide = cast_to(node, zero, "int32")
        at = relax_call(node, relax.op.add, wide, node.constant(np.array(shift, np.int32))) if shift else wide
    if not shift:
        return x, at
    if x.constant is not None:
        return node.constant((x.constant.astype(np.int32) + shift).astype(dtype)), at
    return pointwise(node, lambda x: x.astype("int32") + shift, x, dtype=dtype, name="shifted"), at


def along(node: Node, value: Value, a: Value, of_rows: bool) -> Value:
    """A scale or zero point: one for the tensor has no dimensions then, and that of rows of A has an axis of columns
    behind it."""
    if value.rank == 1 and is_one(value.shape[0]):
        return reshape_to(node, value, ())
    if of_rows and value.rank == 1 and a.rank > 1:
        return reshape_to(node, asserted(node, value, (a.shape[-2],)), (a.shape[-2], 1))
    return value


def _sums(node: Node, x: Value, axis: int, keep: bool) -> Value:
    """Sums of bytes along an axis in int32."""
    if x.constant is not None:
        return node.constant(x.constant.sum(axis, dtype=np.int32, keepdims=keep))
    return node.emit(relax.op.sum(node.tensor(cast_to(node, x, "int32")), axis=[axis], keepdims=keep), "int32")
