"""DequantizeLinear: integers and small floats with scales and zero points, for the tensor, along an axis, or in blocks.

A constant matrix of integers stays one (lowering/quantised.py): products read it as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ..compute import agreed
from ..node import Node
from ..quantised import Quantised
from ..values import Value
from . import op
from .cast import cast_to
from .contents import static_axis
from .kernels import compute

_BITS = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4}


@op("DequantizeLinear", since=10)
def dequantize_linear(node: Node, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """(x - zero) * scale, computed in float32, in the type of the scale unless output_dtype says otherwise."""
    to = node.attr("output_dtype", 0)
    dtype = ir.DataType(to).numpy().name if to else scale.dtype
    size = node.attr("block_size", 0)
    axis = static_axis(node, node.attr("axis", 1), x.rank) if scale.rank else 0
    _check(node, x, scale, zero, axis, size)
    matrix = _matrix(x, scale, zero, axis, size, np.dtype(dtype))
    if matrix is not None:
        return node.quantised(matrix)

    def element(index: Any, x: Any, s: Any, z: Any = None) -> Any:
        place: Any = index if size else (index[axis],) if scale.rank else ()
        if size:
            place = (*index[:axis], index[axis] // size, *index[axis + 1 :])
        number = x(*index)
        if z is not None:
            number = number - z(*place)
        return (number * s(*place)).astype(dtype)

    operands = [cast_to(node, value, "float32") for value in (x, scale, zero) if value is not None]
    return compute(node, "dequantize", element, operands, x.shape, dtype=dtype)


def _check(node: Node, x: Value, scale: Value, zero: Value | None, axis: int, size: int) -> None:
    if zero is not None and zero.rank != scale.rank:
        raise node.error(f"x_zero_point has rank {zero.rank}, and x_scale rank {scale.rank}.", "Give them one shape.")
    if size and scale.rank != x.rank:
        raise node.error(
            f"x_scale has rank {scale.rank}, and blocks of x need {x.rank}.", "Give a scale for each block."
        )
    if not size and scale.rank > 1:
        raise node.error(f"x_scale has rank {scale.rank}.", "Set block_size, or give a scalar or a vector.")
    if not size and scale.rank == 1:
        agreed(node, "the length of x_scale", scale.shape[0], x.shape[axis])


def _matrix(x: Value, scale: Value, zero: Value | None, axis: int, size: int, dtype: np.dtype) -> Quantised | None:
    """The result as a matrix of codes, if all of it is constant."""
    codes, scales, zeros = (None if v is None else v.constant for v in (x, scale, zero))
    if x.rank != 2 or x.dtype not in _BITS or codes is None or scales is None or (zero is not None and zeros is None):
        return None
    block = [
        size if size and k == axis else 1 if size or (k == axis and scale.rank) else n for k, n in enumerate(x.shape)
    ]
    shape = [-(-n // b) for n, b in zip(x.shape, block)] if 0 not in x.shape else None
    if shape is None or scales.size != shape[0] * shape[1]:
        return None
    bits = _BITS[x.dtype]
    middle = 2 ** (bits - 1) if x.dtype.startswith("u") else 0
    numbers = codes.astype(np.int16) - middle
    z = np.full(shape, -middle, np.int16)
    if zeros is not None:
        z = zeros.astype(np.int16).reshape(shape) - middle
    return Quantised(
        numbers.astype(np.int8),
        scales.reshape(shape),
        z.astype(np.int8) if z.any() else None,
        (block[0], block[1]),
        bits,
        dtype,
    )
