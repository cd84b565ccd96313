"""Matmuls of matrices of bytes: ONNX MatMulInteger and QLinearMatMul.

Sums are exact in int32, as ONNX has them, modulo 2^32. The first matrix becomes one of unsigned bytes and the second
one of signed bytes, with zero points to match, which is what machines multiply; zero points are taken off the sums:

    sum (a - za) (b - zb) = sum a b - za (sum b - K zb) - zb sum a
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..importing.compute import pointwise, relax_call
from ..importing.node import Node
from ..importing.values import Size, Value, is_one
from . import op
from .asserted import asserted
from .cast import cast_to
from .matmul import emit_matmul
from .quantization import quantized
from .reshape import reshape_to

BYTES = ("uint8", "int8")
_MIDDLE = 128  # between what a byte without and one with a sign stand for


@op("MatMulInteger", since=10)
def matmul_integer(node: Node, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None) -> Value:
    """https://onnx.ai/onnx/operators/onnx__MatMulInteger.html; zero points for the tensor, for rows of A or columns of
    B."""
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
    """The matmul's numbers over y_scale, rounded to nearest even, plus y_zero, saturated:
    https://onnx.ai/onnx/operators/onnx__QLinearMatMul.html"""
    scales = of_rows(node, a_scale, a, b), of_columns(node, b_scale, b), of_rows(node, y_scale, a, b)
    return requantized(node, integer_matmul(node, a, b, a_zero, b_zero), *scales, of_rows(node, y_zero, a, b))


def requantized(node: Node, sums: Value, a_scale: Value, b_scale: Value, y_scale: Value, y_zero: Value) -> Value:
    """Sums [...] int32 in units of a_scale b_scale as bytes in units of y_scale, of the type of y_zero; scales are of
    any float type, and all four broadcast to the sums."""
    scales = [cast_to(node, scale, "float32") for scale in (a_scale, b_scale, y_scale)]
    factor = pointwise(node, lambda a, b, y: a * b / y, *scales, name="scale")
    return quantized(
        node, relax_call(node, relax.op.multiply, cast_to(node, sums, "float32"), factor), y_zero, y_zero.dtype
    )


def integer_matmul(node: Node, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> Value:
    """sum over k of (a - a_zero) (b - b_zero), int32 modulo 2^32: numpy.matmul of A [..., M, K] and B [..., K, N], each
    uint8 or int8. Zero points have the type of what they are of, for the tensor, or for rows [M] and columns [N].

    Raises NodeError for other types, and for shapes that do not fit.
    """
    for name, value in (("A", a), ("B", b)):
        if value.dtype not in BYTES:
            raise node.error(f"{name} has type {value.dtype}.", "Give it bytes: uint8 or int8.")
    if a.rank == 1 or b.rank == 1:  # a vector is a matrix of one row or column
        row, column = a.rank == 1, b.rank == 1
        a_zero = None if a_zero is None else along(node, a_zero, a.shape[-2] if a.rank > 1 else None)
        b_zero = None if b_zero is None else along(node, b_zero, b.shape[-1] if b.rank > 1 else None)
        a = reshape_to(node, a, (1, *a.shape)) if row else a
        b = reshape_to(node, b, (*b.shape, 1)) if column else b
        y = integer_matmul(node, a, b, a_zero, b_zero)
        kept = [n for k, n in enumerate(y.shape) if not (row and k == y.rank - 2) and not (column and k == y.rank - 1)]
        return reshape_to(node, y, tuple(kept))
    a_zero = None if a_zero is None else of_rows(node, a_zero, a, b)
    b_zero = None if b_zero is None else of_columns(node, b_zero, b)
    a, a_zero = _as_bytes(node, a, a_zero, "uint8")
    b, b_zero = _as_bytes(node, b, b_zero, "int8")
    y = emit_matmul(node, a, b, "int32")
    if a_zero is not None:
        sums = _sums(node, b, b.rank - 2)
        if b_zero is not None:
            depth = cast_to(node, reshape_to(node, node.sizes([a.shape[-1]]), ()), "int32")
            sums = relax_call(node, relax.op.subtract, sums, relax_call(node, relax.op.multiply, b_zero, depth))
        y = relax_call(node, relax.op.subtract, y, relax_call(node, relax.op.multiply, sums, a_zero))
    if b_zero is not None:
        sums = _sums(node, a, a.rank - 1)
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


def along(node: Node, value: Value, size: Size | None = None, behind: bool = False) -> Value:
    """A scale or zero point, as what broadcasts: one for the tensor has no dimensions then; a vector is known or
    asserted at run time to have so many, with an axis `behind` it. Raises NodeError for a vector where size is None.
    """
    if value.rank == 1 and is_one(value.shape[0]):
        return reshape_to(node, value, ())
    if value.rank != 1:
        return value
    if size is None:
        raise node.error(f"{node.name_of(value, False)} is a vector of {value.shape[0]}.", "Give it one element.")
    value = asserted(node, value, (size,))
    return reshape_to(node, value, (size, 1)) if behind else value


def of_rows(node: Node, value: Value, a: Value, b: Value) -> Value:
    """Those of the first matrix."""
    return along(node, value, a.shape[-2] if a.rank > 1 else None, behind=b.rank > 1)


def of_columns(node: Node, value: Value, b: Value) -> Value:
    """Those of the second matrix."""
    return along(node, value, b.shape[-1] if b.rank > 1 else None)


def _sums(node: Node, x: Value, axis: int) -> Value:
    """Sums of bytes along an axis in int32, which stays as one of 1."""
    if x.constant is not None:
        return node.constant(x.constant.sum(axis, dtype=np.int32, keepdims=True))
    return node.emit(relax.op.sum(node.tensor(cast_to(node, x, "int32")), axis=[axis], keepdims=True), "int32")
