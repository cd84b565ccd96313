"""com.microsoft GatherBlockQuantized: rows of a table of codes, made numbers where they are read.

An element is (code - zero) * scale. Scales and zeros hold for blocks of successive elements along quantize_axis. Codes
of 4 bits stay two in a byte. What no index can be gives zeros, and is no error as it is for Gather.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..contents import static_axis
from ..gather import wrapped
from ..kernels import compute
from . import DOMAIN
from .matmul_n_bits import unpacked

_TYPES = {"int4": 4, "uint4": 4, "uint8": 0}
"""Of codes, with their bits; 0: as the attribute says."""


@op("GatherBlockQuantized", since=1, domain=DOMAIN)
def gather_block_quantized(
    node: Node, data: Value, indices: Value, scales: Value, zero_points: Value | None = None
) -> Value:
    """Rows of a constant table of codes, int4, uint4 or bytes that hold codes, at indices along gather_axis, as numbers
    of the type of scales; scales and zero_points are [blocks along quantize_axis, else as data].
    """
    if data.dtype not in _TYPES:
        raise node.error(f"input data is {data.dtype}.", "Use int4, uint4 or uint8.")
    bits, size = _TYPES[data.dtype] or node.attr("bits", 4), node.attr("block_size", 128)
    if bits not in (2, 4, 8):
        raise node.error(f"attribute bits is {bits}.", "Use 2, 4 or 8.")
    if size < 1:
        raise node.error(f"attribute block_size is {size}.", "Use a power of 2 from 16 on.")
    if data.constant is None or scales.constant is None or (zero_points is not None and zero_points.constant is None):
        raise node.error("data, scales or zero_points are computed at run time.", "Make them initializers.")
    stored = bits if data.dtype == "uint8" else 8  # bits of a code in the model's tensors
    codes = _codes(data.constant, stored)
    axis = static_axis(node, node.attr("gather_axis", 0), codes.ndim)
    along = static_axis(node, node.attr("quantize_axis", 1), codes.ndim)
    shape = list(codes.shape)
    blocks = [math.ceil(n / size) if k == along else n for k, n in enumerate(shape)]
    middle = 0 if data.dtype == "int4" else 2 ** (bits - 1)
    zeros = np.full(blocks, middle if data.dtype == "uint8" else 0, np.int16)
    if zero_points is not None and zero_points.constant is not None:
        zeros = _codes(zero_points.constant, stored)[..., : blocks[-1]]
    for name, found in (("scales", scales.constant), ("zero_points", zeros)):
        if list(found.shape) != blocks:
            raise node.error(
                f"input {name} is of shape {list(found.shape)}, and {blocks} blocks of {size} are in data.",
                "Correct it, block_size or quantize_axis.",
            )
    packed = _packed(codes - middle, bits)
    tensors = [indices, packed_value := node.constant(packed), node.constant(scales.constant.astype(np.float32))]
    centered = bool((zeros == middle).all())
    if not centered:
        tensors.append(node.constant((zeros - middle).astype(np.int8)))
    half = packed_value.dtype == "uint8"
    rows, end = shape[axis], axis + indices.rank

    def element(i: Any, at: Any, code_of: Any, scale_of: Any, zero_of: Any = None) -> Any:
        index = at(*i[axis:end]).astype("int64")
        place = [*i[:axis], wrapped(index, rows), *i[end:]]
        block = [p // size if k == along else p for k, p in enumerate(place)]
        if half:
            byte = code_of(*place[:-1], place[-1] // 2)
            low = tirx.shift_right(byte, (place[-1] % 2 * 4).astype("uint8")).astype("int32") & 15
            code = (low ^ 8) - 8
        else:
            code = code_of(*place).astype("int32")
        if zero_of is not None:
            code = code - zero_of(*block).astype("int32")
        there = tirx.all(index >= -rows, index < rows)
        number = code.astype("float32") * scale_of(*block)
        return tirx.Select(there, number, tirx.const(0, "float32")).astype(scales.dtype)

    result = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
    return compute(node, "gather_codes", element, tensors, result, dtype=scales.dtype)


def _codes(stored: np.ndarray, bits: int) -> np.ndarray:
    """Integers, of which a byte holds 8 / bits, lowest bits first."""
    return (stored if bits == 8 else unpacked(stored, bits)).astype(np.int16)


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes: int8, or two of at most 4 bits in an uint8, the first in its low half."""
    if bits == 8:
        return codes.astype(np.int8)
    even = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    pairs = (even & 15).astype(np.uint8).reshape(*even.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4
