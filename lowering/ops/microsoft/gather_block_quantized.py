"""com.microsoft GatherBlockQuantized: rows of a quantized table, dequantized where they are read.

An element is (quantized value - zero point) * scale. Scales and zero points are shared by blocks of successive elements
along quantize_axis. 4-bit values stay packed in pairs. An index out of range gives zeros, and is not an error as for
Gather.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import tirx

from ...importing.node import Node
from ...importing.quantized_matrix import pack_bits, unpack_bits
from ...importing.values import Value
from .. import op
from ..helpers.contents import normalize_axis
from ..helpers.kernels import compute
from ..helpers.requirements import require_choice, require_dtype, require_range
from ..tensor.gather import wrap_index
from . import DOMAIN

_TYPES = {"int4": 4, "uint4": 4, "uint8": 0}
"""The types of quantized values, with their bits; 0 means the attribute bits."""


@op("GatherBlockQuantized", since=1, domain=DOMAIN)
def gather_block_quantized(
    node: Node, data: Value, indices: Value, scales: Value, zero_points: Value | None = None
) -> Value:
    """Return rows of a constant quantized table at indices along gather_axis, dequantized to the type of scales.

    The table is int4, uint4, or bytes that pack quantized values. scales and zero_points have the shape of the table,
    but for the blocks along quantize_axis.
    """
    bits, size = _read_bits_and_block_size(node, data)
    if data.constant is None or scales.constant is None or (zero_points is not None and zero_points.constant is None):
        raise node.error(
            "node.constant_required", "data, scales or zero_points are computed at run time.", "Make them initializers."
        )
    stored_bits = bits if data.dtype == "uint8" else 8  # bits of a quantized value in the model's tensors
    quantized = _unpack_values(data.constant, stored_bits)
    axis = normalize_axis(node, node.attr("gather_axis", 0), quantized.ndim)
    quantize_axis = normalize_axis(node, node.attr("quantize_axis", 1), quantized.ndim)
    shape = list(quantized.shape)
    blocks = [math.ceil(n / size) if k == quantize_axis else n for k, n in enumerate(shape)]
    offset = 0 if data.dtype == "int4" else 2 ** (bits - 1)
    zeros = np.full(blocks, offset if data.dtype == "uint8" else 0, np.int16)
    if zero_points is not None and zero_points.constant is not None:
        zeros = _unpack_values(zero_points.constant, stored_bits)[..., : blocks[-1]]
    for name, array in (("scales", scales.constant), ("zero_points", zeros)):
        if list(array.shape) != blocks:
            raise node.error(
                "node.shape_mismatch",
                f"input {name} has shape {list(array.shape)}, and data consists of {blocks} blocks of {size}.",
                "Correct it, block_size or quantize_axis.",
            )
    packed = _pack_values(quantized - offset, bits)
    tensors = [indices, packed_value := node.constant(packed), node.constant(scales.constant.astype(np.float32))]
    centered = bool((zeros == offset).all())
    if not centered:
        tensors.append(node.constant((zeros - offset).astype(np.int8)))
    is_packed = packed_value.dtype == "uint8"
    rows, end = shape[axis], axis + indices.rank

    def element(i: Any, gather_index: Any, read_quantized: Any, read_scale: Any, read_zero: Any = None) -> Any:
        index = gather_index(*i[axis:end]).astype("int64")
        element_index = [*i[:axis], wrap_index(index, rows), *i[end:]]
        block = [p // size if k == quantize_axis else p for k, p in enumerate(element_index)]
        if is_packed:
            byte = read_quantized(*element_index[:-1], element_index[-1] // 2)
            low = tirx.shift_right(byte, (element_index[-1] % 2 * 4).astype("uint8")).astype("int32") & 15
            value = (low ^ 8) - 8
        else:
            value = read_quantized(*element_index).astype("int32")
        if read_zero is not None:
            value = value - read_zero(*block).astype("int32")
        is_inside = tirx.all(index >= -rows, index < rows)
        number = value.astype("float32") * read_scale(*block)
        return tirx.Select(is_inside, number, tirx.const(0, "float32")).astype(scales.dtype)

    result = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    return compute(node, "gather_quantized", element, tensors, result, dtype=scales.dtype)


def _read_bits_and_block_size(node: Node, data: Value) -> tuple[int, int]:
    """Return the bits of a quantized value, and the number of values in a block."""
    require_dtype(node, "data", data, _TYPES)
    bits, size = _TYPES[data.dtype] or node.attr("bits", 4), node.attr("block_size", 128)
    require_choice(node, "bits", bits, (2, 4, 8))
    require_range(node, "block_size", size, 1)
    return bits, size


def _unpack_values(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the values as integers; a byte packs 8 / bits of them, lowest bits first."""
    return (packed if bits == 8 else unpack_bits(packed, bits)).astype(np.int16)


def _pack_values(quantized: np.ndarray, bits: int) -> np.ndarray:
    """Pack signed quantized values: int8, or two of at most 4 bits in a uint8, the first in its low half."""
    return quantized.astype(np.int8) if bits == 8 else pack_bits(quantized, 4)
