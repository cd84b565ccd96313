"""Matrices of small integers with scales, as models hold them and as `compile(..., weights=...)` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

INT4_BLOCK = 32

_LARGEST = {4: 7, 8: 127}


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix [R, C] with elements (code - zero) * scale, rounded to `dtype`.

    codes is int8 [R, C], of 8 bits or of 4 (-8 to 7). scales is [ceil(R / r), ceil(C / c)] for blocks of r x c
    elements, floats or float16; so is zeros, int8 or floats, or None where they are all 0.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    block: tuple[int, int]
    bits: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        """Bytes when codes are packed."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.size * self.bits // 8 + self.scales.nbytes + zeros

    @property
    def ndim(self) -> int:
        return 2

    def transpose(self, axes: Sequence[int]) -> Quantized:
        """The matrix with its axes in another order."""
        zeros = None if self.zeros is None else self.zeros.transpose(axes)
        rows, columns = (self.block[axis] for axis in axes)
        codes, scales = self.codes.transpose(axes), self.scales.transpose(axes)
        return replace(self, codes=codes, scales=scales, zeros=zeros, block=(rows, columns))

    def astype(self, dtype: np.dtype) -> Quantized:
        return replace(self, dtype=np.dtype(dtype))

    def of_blocks(self, values: np.ndarray) -> np.ndarray:
        """Values of blocks, one for each element."""
        rows, columns = self.shape
        r, c = self.block
        return values.repeat(r, axis=0)[:rows].repeat(c, axis=1)[:, :columns]

    def array(self) -> np.ndarray:
        """The elements."""
        values = self.codes.astype(np.float32)
        if self.zeros is not None:
            values -= self.of_blocks(self.zeros.astype(np.float32))
        return (values * self.of_blocks(self.scales.astype(np.float32))).astype(self.dtype)


def quantize(matrix: np.ndarray, bits: int) -> Quantized:
    """The nearest Quantized of a matrix [K, N] of finite floats, without zeros.

    8 bits: a float32 scale for each column. 4 bits: a float16 scale for each column and 32 successive k, so that the
    element of largest magnitude is -8 times the scale; float32 where float16 has no such number.
    """
    rows, columns = matrix.shape
    block = rows if bits == 8 else INT4_BLOCK
    blocks = -(-rows // block)
    padded = np.zeros((blocks * block, columns), np.float32)
    padded[:rows] = matrix
    padded = padded.reshape(blocks, block, columns)
    if bits == 8:
        scales = np.abs(padded).max(axis=1) / np.float32(127)
    else:
        largest = np.abs(padded).argmax(axis=1)
        scales = np.take_along_axis(padded, largest[:, None], axis=1)[:, 0] / np.float32(-8)
        used = np.abs(scales[scales != 0])
        limits = np.finfo(np.float16)
        if ((used >= limits.smallest_normal) & (used <= limits.max)).all():
            scales = scales.astype(np.float16)
    divisors = scales.astype(np.float32)
    divisors[divisors == 0] = 1
    largest_code = _LARGEST[bits]
    codes = np.rint(padded / divisors[:, None]).clip(-largest_code - 1, largest_code).astype(np.int8)
    return Quantized(codes.reshape(-1, columns)[:rows], scales, None, (block, 1), bits, matrix.dtype)
