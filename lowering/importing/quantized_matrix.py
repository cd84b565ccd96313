"""Matrices of small integers with scales, from models and from `compile(..., weights=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..chunks import map_columns

INT4_BLOCK = 32

_MAX_QUANTIZED = {4: 7, 8: 127}


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix [R, C] with elements (value - zero point) * scale, rounded to `dtype`.

    values is int8 [R, C], of 8 bits or of 4 (-8 to 7). scales is [ceil(R / r), ceil(C / c)] for blocks of r x c
    elements, floats or float16. zero_points has the same shape, int8 or floats, or is None if they are all 0.
    permits_int8_rows permits kernels to quantize the rows that are multiplied by the matrix to int8, block by block.
    """

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None
    block: tuple[int, int]
    bits: int
    dtype: np.dtype
    permits_int8_rows: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        """Bytes when quantized values are packed."""
        zero_points = 0 if self.zero_points is None else self.zero_points.nbytes
        return self.values.size * self.bits // 8 + self.scales.nbytes + zero_points

    @property
    def ndim(self) -> int:
        return 2

    @property
    def scale_block(self) -> int:
        """How many successive rows share a scale; 0 for all."""
        return self.block[0] if self.block[0] < self.shape[0] else 0

    def transpose(self, axes: Sequence[int]) -> QuantizedMatrix:
        """Return the matrix with permuted axes."""
        zero_points = None if self.zero_points is None else self.zero_points.transpose(axes)
        rows, columns = (self.block[axis] for axis in axes)
        values, scales = self.values.transpose(axes), self.scales.transpose(axes)
        return replace(self, values=values, scales=scales, zero_points=zero_points, block=(rows, columns))

    def get_columns(self, chunk: slice) -> QuantizedMatrix:
        """Return some columns; the chunk begins with a block of columns."""
        size = self.block[1]
        blocks = slice(chunk.start // size, -(-chunk.stop // size))
        zero_points = None if self.zero_points is None else self.zero_points[:, blocks]
        return replace(self, values=self.values[:, chunk], scales=self.scales[:, blocks], zero_points=zero_points)

    def astype(self, dtype: np.dtype) -> QuantizedMatrix:
        return replace(self, dtype=np.dtype(dtype))

    def expand_blocks(self, values: np.ndarray) -> np.ndarray:
        """Return the values of blocks, repeated for each element."""
        rows, columns = self.shape
        r, c = self.block
        values = values if r == 1 else values.repeat(r, axis=0)[:rows]
        return values if c == 1 else values.repeat(c, axis=1)[:, :columns]

    def array(self) -> np.ndarray:
        """Return the dequantized elements."""
        values = self.values.astype(np.float32)
        if self.zero_points is not None:
            values -= self.expand_blocks(self.zero_points.astype(np.float32))
        return (values * self.expand_blocks(self.scales.astype(np.float32))).astype(self.dtype)


def quantize_matrix(matrix: np.ndarray, bits: int) -> QuantizedMatrix:
    """Return the nearest QuantizedMatrix of a matrix [K, N] of finite floats, without zero points.

    8 bits: a float32 scale for each column. 4 bits: a float16 scale for each column and 32 successive k, so that the
    element of largest magnitude is -8 times the scale. The scale is float32 if float16 cannot represent it. Scales of
    numbers that are not finite are not finite.
    """
    rows, columns = matrix.shape
    block = rows if bits == 8 else INT4_BLOCK
    values = np.empty((rows, columns), np.int8)

    def compute_scales(chunk: slice) -> np.ndarray:
        blocks = _split_blocks(matrix[:, chunk], block)
        low, high = blocks.min(axis=1), blocks.max(axis=1)
        if bits == 8:
            return np.maximum(high, -low) / np.float32(127)
        return np.where(-low > high, low, high) / np.float32(-8)

    def quantize(chunk: slice) -> None:
        divisors = scales[:, None, chunk].astype(np.float32)
        divisors[divisors == 0] = 1
        quotients = _split_blocks(matrix[:, chunk], block)
        quotients /= divisors
        largest = _MAX_QUANTIZED[bits]
        np.rint(quotients, out=quotients)
        np.clip(quotients, -largest - 1, largest, out=quotients)
        values[:, chunk] = quotients.reshape(-1, quotients.shape[-1])[:rows]

    with np.errstate(invalid="ignore", over="ignore"):
        scales = np.concatenate(map_columns(compute_scales, rows, columns), axis=1)
        if np.isfinite(scales).all():
            scales = _narrow_scales(scales) if bits == 4 else scales
            map_columns(quantize, rows, columns)
    return QuantizedMatrix(values, scales, None, (block, 1), bits, matrix.dtype)


def _split_blocks(matrix: np.ndarray, block: int) -> np.ndarray:
    """Return a float32 copy [blocks, block, N] of a matrix [K, N], with zeros after row K."""
    rows, columns = matrix.shape
    blocks = -(-rows // block)
    padded = np.empty((blocks * block, columns), np.float32)
    padded[:rows] = matrix
    padded[rows:] = 0
    return padded.reshape(blocks, block, columns)


def _narrow_scales(scales: np.ndarray) -> np.ndarray:
    """Return scales as float16 if all of them are normal numbers of it."""
    used = np.abs(scales[scales != 0])
    limits = np.finfo(np.float16)
    is_normal = ((used >= limits.smallest_normal) & (used <= limits.max)).all()
    return scales.astype(np.float16) if is_normal else scales


def pack_bits(values: np.ndarray, bits: int, word: type[np.unsignedinteger] = np.uint8) -> np.ndarray:
    """Pack integers [..., elements] of this many bits into words, lowest first; missing ones are 0."""
    per_word = np.dtype(word).itemsize * 8 // bits
    missing = -values.shape[-1] % per_word
    padded = np.pad((values & (2**bits - 1)).astype(word), [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    shifts = np.arange(per_word, dtype=word) * word(bits)
    return np.bitwise_or.reduce(padded.reshape(*values.shape[:-1], -1, per_word) << shifts, axis=-1)


def unpack_bits(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack [..., bytes] to [..., elements] of this many bits, lowest first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (packed[..., None] >> shifts & (2**bits - 1)).reshape(*packed.shape[:-1], -1)
