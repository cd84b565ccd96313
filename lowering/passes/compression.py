"""What `compile(..., weights=...)` makes of constant matrices, and what it costs."""

from __future__ import annotations

import numpy as np

from ..choices import Scheme
from ..importing.quantized import INT4_BLOCK, Quantized, quantize

_MIN_BLOCK = 8  # rows that share a scale; with fewer, scales would be as large as the matrix


def plain(weight: np.ndarray | Quantized) -> np.ndarray:
    """The elements, in the weight's type."""
    return weight.array() if isinstance(weight, Quantized) else weight


def stored(matrix: np.ndarray | Quantized, compression: Compression | None) -> np.ndarray | Quantized:
    """What becomes of a matrix [K, N] that is packed: compressed if asked for; floats where blocks are short."""
    if isinstance(matrix, np.ndarray) and compression is not None:
        matrix = compression.compress(matrix)
    short = isinstance(matrix, Quantized) and min(matrix.block[0], matrix.shape[0]) < _MIN_BLOCK
    return plain(matrix) if short else matrix


class Compression:
    """Compresses matrices by a scheme, and keeps account."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.compressed = 0
        self.left = 0
        self.bytes = [0, 0]  # of the compressed matrices: before and after
        self.squares = [0.0, 0.0]  # of their errors, and of their elements

    def compress(self, matrix: np.ndarray) -> np.ndarray | Quantized:
        """A float matrix [K, N] in the scheme; as it is where that is no smaller, or cannot hold it."""
        bits = {"f16": 16, "int8": 8, "int4": 4}[self.scheme]
        if matrix.dtype.itemsize * 8 <= bits or not np.isfinite(matrix).all() or matrix.shape[0] < _MIN_BLOCK:
            self.left += 1
            return matrix
        with np.errstate(over="ignore"):
            smaller = matrix.astype(np.float16) if bits == 16 else quantize(matrix, bits)
        exact, array = matrix.astype(np.float32), plain(smaller).astype(np.float32)
        if not np.isfinite(array).all():
            self.left += 1
            return matrix
        self.compressed += 1
        self.bytes[0] += matrix.nbytes
        self.bytes[1] += smaller.nbytes
        self.squares[0] += float(np.square(array - exact, dtype=np.float64).sum())
        self.squares[1] += float(np.square(exact, dtype=np.float64).sum())
        return smaller

    def cost(self) -> str:
        """What compression did, for the user."""
        how = {
            "f16": "f16",
            "int8": "int8 with a scale for each column",
            "int4": f"int4 with a scale for each column and {INT4_BLOCK} rows",
        }[self.scheme]
        before, after = (size / 2**20 for size in self.bytes)
        error = (self.squares[0] / max(self.squares[1], np.finfo(np.float64).tiny)) ** 0.5
        left = f"; {self.left} could not be" if self.left else ""
        return (
            f"{self.compressed} constant matrices of matmuls are {how}: {after:.1f} MiB instead of {before:.1f}, "
            f"root mean square error {error:.2g} of theirs{left}"
        )
