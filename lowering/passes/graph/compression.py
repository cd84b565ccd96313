"""Compression of constant matrices by `compile(..., weights=...)`, and its error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...choices import INT8_ROWS, Scheme
from ...importing.quantized_matrix import INT4_BLOCK, QuantizedMatrix, quantize_matrix

_MIN_BLOCK = 8  # rows that share a scale; with fewer, scales would be as large as the matrix


def to_array(weight: np.ndarray | QuantizedMatrix) -> np.ndarray:
    """Return the elements, in the weight's type."""
    return weight.array() if isinstance(weight, QuantizedMatrix) else weight


def prepare_matrix(
    matrix: np.ndarray | QuantizedMatrix, compression: Compression | None, accuracy_level: int | None
) -> np.ndarray | QuantizedMatrix:
    """Return a matrix [K, N] as it is packed: compressed if a scheme is set; floats if its blocks are short."""
    if isinstance(matrix, np.ndarray) and compression is not None:
        matrix = compression.compress(matrix)
    if isinstance(matrix, QuantizedMatrix) and accuracy_level is not None:
        matrix = replace(matrix, permits_int8_rows=accuracy_level == INT8_ROWS)
    has_short_blocks = isinstance(matrix, QuantizedMatrix) and min(matrix.block[0], matrix.shape[0]) < _MIN_BLOCK
    return to_array(matrix) if has_short_blocks else matrix


class Compression:
    """Compresses matrices by a scheme, and accumulates statistics."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.compressed = 0
        self.left = 0
        self.bytes = [0, 0]  # of the compressed matrices: before and after
        self.squares = [0.0, 0.0]  # of their errors, and of their elements

    def compress(self, matrix: np.ndarray) -> np.ndarray | QuantizedMatrix:
        """Return a float matrix [K, N] in the scheme; unchanged if that is not smaller, or cannot represent it."""
        bits = {"f16": 16, "int8": 8, "int4": 4}[self.scheme]
        if matrix.dtype.itemsize * 8 <= bits or not np.isfinite(matrix).all() or matrix.shape[0] < _MIN_BLOCK:
            self.left += 1
            return matrix
        with np.errstate(over="ignore"):
            smaller = matrix.astype(np.float16) if bits == 16 else quantize_matrix(matrix, bits)
        exact, array = matrix.astype(np.float32), to_array(smaller).astype(np.float32)
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
        """Return a description of the compression for the user."""
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
