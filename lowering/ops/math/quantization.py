"""QuantizeLinear and DequantizeLinear: integers and small floats with scales and zero points.

Scales are per tensor, per index of an axis, or per block. A constant matrix of integers stays quantized
(lowering/importing/quantized_matrix.py): matmuls read it directly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from tvm import relax, tirx

from ...importing.node import Node
from ...importing.quantized_matrix import QuantizedMatrix
from ...importing.values import MAX_DIMENSION, Value, storage_dtype
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_shape
from ..helpers.compute import pointwise, relax_call
from ..helpers.contents import normalize_axis
from ..helpers.float8 import FORMATS, encode
from ..helpers.kernels import compute
from ..tensor.cast import cast_to
from ..tensor.reshape import reshape_to

_BITS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4, "int2": 4, "uint2": 4}
"""The numbers of bits in which constant matrices are stored."""
_RANGES = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (2, 4, 8, 16)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (2, 4, 8, 16)},
}
_PRECISIONS = {"int32": "float64", "float8_e8m0fnu": "float32"}  # of a division by such a scale, as in NumPy


@op("QuantizeLinear", since=10)
def quantize_linear(node: Node, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Emit x / scale + zero, rounded to nearest even and saturated.

    https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html. The quotient has the type of the scale unless precision
    sets another.
    """
    to, precise = (_read_dtype(node.attr(name, 0)) for name in ("output_dtype", "precision"))
    dtype = to or ("uint8" if zero is None else zero.dtype)
    if zero is not None and zero.dtype != dtype:
        raise node.error(
            "quantize_linear.dtype_mismatch",
            f"output_dtype is {dtype}, and y_zero_point has type {zero.dtype}.",
            "Leave output_dtype out.",
        )
    if dtype not in _RANGES and dtype not in FORMATS:
        raise node.error(
            "quantize_linear.dtype_unsupported",
            f"cannot quantize to {dtype}.",
            f"Use one of {', '.join((*_RANGES, *FORMATS))}.",
        )
    precise = precise or _PRECISIONS.get(scale.dtype, scale.dtype)
    wide = "float64" if precise == "float64" else "float32"
    scale, zero, axis, size = _read_blocks(node, x, scale, zero, "y")
    saturate = bool(node.attr("saturate", 1))

    def element(index: Any, x: Any, s: Any, z: Any = None) -> Any:
        scale_index = _index_scale(index, scale, axis, size)
        number = (x(*index) / s(*scale_index)).astype(precise).astype(wide)
        if dtype in FORMATS:
            number = number if z is None else number + z(*scale_index)
            return encode(number.astype("float64"), dtype, saturate)
        return _quantize_element(number, None if z is None else z(*scale_index), dtype)

    # Rounded to the type of the quotient first, where that is narrower.
    operands = [cast_to(node, cast_to(node, value, precise), wide) for value in (x, scale)]
    operands += [cast_to(node, zero, wide)] if zero is not None else []
    return compute(node, "quantize", element, operands, x.shape, dtype=dtype)


@op("DequantizeLinear", since=10)
def dequantize_linear(node: Node, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """Emit (x - zero) * scale in float32, in the type of the scale unless output_dtype sets another."""
    dtype = _read_dtype(node.attr("output_dtype", 0)) or scale.dtype
    scale, zero, axis, size = _read_blocks(node, x, scale, zero, "x")
    matrix = _read_matrix(x, scale, zero, axis, size, np.dtype(dtype))
    if matrix is not None:
        return node.quantized(matrix)

    def element(index: Any, x: Any, s: Any, z: Any = None) -> Any:
        scale_index = _index_scale(index, scale, axis, size)
        number = x(*index)
        if z is not None:
            number = number - z(*scale_index)
        return (number * s(*scale_index)).astype(dtype)

    operands = [cast_to(node, value, "float32") for value in (x, scale, zero) if value is not None]
    return compute(node, "dequantize", element, operands, x.shape, dtype=dtype)


@op("DynamicQuantizeLinear", since=11)
def dynamic_quantize_linear(node: Node, x: Value) -> tuple[Value, ...]:
    return quantize_dynamically(node, x)


def quantize_dynamically(node: Node, x: Value) -> tuple[Value, Value, Value]:
    """Emit x [...] float32 quantized to bytes, its scale and its zero point.

    The range is from the smallest number, or 0, to the largest, or 0:
    https://onnx.ai/onnx/operators/onnx__DynamicQuantizeLinear.html. Where all numbers are 0 the scale is 1 / 255, as in
    ONNX's reference.
    """
    axes = list(range(x.rank))
    low, high = (node.emit(f(node.tensor(x), axis=axes, keepdims=False)) for f in (relax.op.min, relax.op.max))

    def compute_scale(low: Any, high: Any) -> Any:
        width = tirx.max(high, tirx.const(0, x.dtype)) - tirx.min(low, tirx.const(0, x.dtype))
        return tirx.Select(tirx.EQ(width, tirx.const(0, x.dtype)), tirx.const(1, x.dtype), width) / tirx.const(
            255, x.dtype
        )

    def compute_zero_point(low: Any, scale: Any) -> Any:
        zero = tirx.nearbyint(-tirx.min(low, tirx.const(0, x.dtype)) / scale)
        return tirx.min(tirx.max(zero, tirx.const(0, x.dtype)), tirx.const(255, x.dtype)).astype("int32")

    scale = pointwise(node, compute_scale, low, high, name="scale")
    zero = pointwise(node, compute_zero_point, low, scale, dtype="uint8", name="zero_point")
    y = quantize_values(node, relax_call(node, relax.op.divide, x, scale), zero, "uint8")
    return y, scale, zero


def quantize_values(node: Node, numbers: Value, zero: Value | None, dtype: str) -> Value:
    """Quantize float32 numbers [...], already divided by their scale.

    They are rounded to nearest even, offset by the zero point, and saturated.
    """
    if zero is None:
        return pointwise(node, lambda x: _quantize_element(x, None, dtype), numbers, dtype=dtype, name="quantize")
    return pointwise(
        node, lambda x, z: _quantize_element(x, z.astype("float32"), dtype), numbers, zero, dtype=dtype, name="quantize"
    )


def _quantize_element(number: Any, zero: Any, dtype: str) -> Any:
    """Return the quantized value of a number over its scale."""
    number = tirx.nearbyint(number)
    number = number if zero is None else number + zero
    low, high = (tirx.const(float(bound), str(number.ty.dtype)) for bound in _RANGES[dtype])
    number = tirx.min(tirx.max(number, low), high).astype("int32")
    return (number & _RANGES[dtype][1] if dtype in ("uint2", "uint4") else number).astype(storage_dtype(dtype))


def _read_dtype(onnx_type: int) -> str | None:
    """Return the name of an element type from an attribute, where 0 means none."""
    return ir.DataType(onnx_type).numpy().name if onnx_type else None


def _read_blocks(
    node: Node, x: Value, scale: Value, zero: Value | None, name: str
) -> tuple[Value, Value | None, int, int]:
    """Return scale, zero point, axis and block size.

    Without blocks, a vector of one element is per tensor. name is the node's name of the quantized tensor.
    """
    size = min(node.attr("block_size", 0), MAX_DIMENSION)
    if not size:
        scale = reshape_to(node, scale, ()) if scale.shape == (1,) else scale
        zero = reshape_to(node, zero, ()) if zero is not None and zero.shape == (1,) else zero
    axis = normalize_axis(node, node.attr("axis", 1), x.rank) if scale.rank else 0
    if zero is not None and zero.rank != scale.rank:
        raise node.error(
            "node.zero_point_rank_mismatch",
            f"{name}_zero_point has rank {zero.rank}, and {name}_scale has rank {scale.rank}.",
            "Give them the same shape.",
        )
    if size and scale.rank != x.rank:
        raise node.error(
            "node.block_scale_rank_mismatch",
            f"{name}_scale has rank {scale.rank}, and blocks of x need rank {x.rank}.",
            "Give a scale for each block.",
        )
    if not size and scale.rank > 1:
        raise node.error(
            "node.scale_rank_unsupported",
            f"{name}_scale has rank {scale.rank}.",
            "Set block_size, or give a scalar or a vector.",
        )
    if scale.rank:
        blocks = list(x.shape) if size else [x.shape[axis]]
        if size:
            blocks[axis] = symbolic.divide(node.symbols, x.shape[axis] + (size - 1), size)
        scale = assert_shape(node, scale, tuple(blocks))
        zero = None if zero is None else assert_shape(node, zero, tuple(blocks))
    return scale, zero, axis, size


def _index_scale(index: Any, scale: Value, axis: int, size: int) -> Any:
    """Return the index of the scale of an element."""
    if size:
        return (*index[:axis], index[axis] // size, *index[axis + 1 :])
    return (index[axis],) if scale.rank else ()


def _read_matrix(
    x: Value, scale: Value, zero: Value | None, axis: int, size: int, dtype: np.dtype
) -> QuantizedMatrix | None:
    """Return the result as a matrix of quantized values, if all of it is constant."""
    quantized_values, scales, zeros = (None if v is None else v.constant for v in (x, scale, zero))
    if (
        x.rank != 2
        or x.dtype not in _BITS
        or quantized_values is None
        or scales is None
        or (zero is not None and zeros is None)
    ):
        return None
    block = [
        size if size and k == axis else 1 if size or (k == axis and scale.rank) else n for k, n in enumerate(x.shape)
    ]
    shape = [-(-n // b) for n, b in zip(x.shape, block)] if 0 not in x.shape else None
    if shape is None or scales.size != shape[0] * shape[1]:
        return None
    bits = _BITS[x.dtype]
    middle = 2 ** (bits - 1) if x.dtype.startswith("u") else 0
    numbers = quantized_values.astype(np.int16) - middle
    z = np.full(shape, -middle, np.int16)
    if zeros is not None:
        z = zeros.astype(np.int16).reshape(shape) - middle
    return QuantizedMatrix(
        numbers.astype(np.int8),
        scales.reshape(shape),
        z.astype(np.int8) if z.any() else None,
        (block[0], block[1]),
        bits,
        dtype,
    )
