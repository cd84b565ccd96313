"""Compression of constant matrices by `compile(..., weights=...)`, and its error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ...choices import BITS, INT8_ROWS, SCHEMES, Scheme
from ...chunks import map_columns, measure_error
from ...importing.quantized_matrix import INT4_BLOCK, QuantizedMatrix, quantize_matrix

_MIN_BLOCK = 8  # rows that share a scale; with fewer, scales would be as large as the matrix


def to_array(weight: np.ndarray | QuantizedMatrix) -> np.ndarray:
    """Return the elements, in the weight's type."""
    return weight.array() if isinstance(weight, QuantizedMatrix) else weight


class Preparation:
    """Prepares constant matrices for packing, by schemes and an accuracy level, and describes the costs."""

    def __init__(self, accuracy_level: int | None, schemes: Iterable[Scheme | None]) -> None:
        self.accuracy_level = accuracy_level
        self._compressions = {scheme: _Compression(scheme) for scheme in SCHEMES if scheme in set(schemes)}

    def prepare(self, matrix: np.ndarray | QuantizedMatrix, scheme: Scheme | None) -> np.ndarray | QuantizedMatrix:
        """Return a matrix [K, N] as it is packed: compressed if a scheme is set; floats if its blocks are short."""
        if isinstance(matrix, np.ndarray) and scheme is not None:
            matrix = self._compressions[scheme].compress(matrix)
        if isinstance(matrix, QuantizedMatrix) and self.accuracy_level is not None:
            matrix = replace(matrix, permits_int8_rows=self.accuracy_level == INT8_ROWS)
        has_short_blocks = isinstance(matrix, QuantizedMatrix) and min(matrix.block[0], matrix.shape[0]) < _MIN_BLOCK
        return to_array(matrix) if has_short_blocks else matrix

    def list_costs(self) -> list[str]:
        """Return a description of each scheme's cost for the user."""
        return [compression.describe_cost() for compression in self._compressions.values()]


def _round_to_float16(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix rounded to float16, with infinities for numbers beyond its range."""
    rounded = np.empty(matrix.shape, np.float16)

    def round_columns(chunk: slice) -> None:
        rounded[:, chunk] = matrix[:, chunk]

    with np.errstate(over="ignore"):
        map_columns(round_columns, *matrix.shape)
    return rounded


def _get_columns(matrix: np.ndarray | QuantizedMatrix, chunk: slice) -> np.ndarray | QuantizedMatrix:
    return matrix.get_columns(chunk) if isinstance(matrix, QuantizedMatrix) else matrix[:, chunk]


def _sum_squares(matrix: np.ndarray, smaller: np.ndarray | QuantizedMatrix) -> tuple[float, float]:
    """Return the sums of squares of the errors, and of a matrix; not finite if an element of either is not."""
    return measure_error(matrix, to_array(smaller.astype(np.dtype(np.float32))))


class _Compression:
    """Compresses matrices by a scheme, and accumulates statistics."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.compressed = 0
        self.left = 0
        self.bytes = [0, 0]  # of the compressed matrices: before and after
        self.squares = [0.0, 0.0]  # of their errors, and of their elements

    def compress(self, matrix: np.ndarray) -> np.ndarray | QuantizedMatrix:
        """Return a float matrix [K, N] in the scheme; unchanged if that is not smaller, or cannot represent it."""
        bits = BITS[self.scheme]
        if matrix.dtype.itemsize * 8 <= bits or matrix.shape[0] < _MIN_BLOCK:
            self.left += 1
            return matrix
        smaller = _round_to_float16(matrix) if bits == 16 else quantize_matrix(matrix, bits)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = map_columns(
                lambda chunk: _sum_squares(matrix[:, chunk], _get_columns(smaller, chunk)), *matrix.shape
            )
        error, size = (sum(terms) for terms in zip(*squares, strict=True))
        if not np.isfinite(error):
            self.left += 1
            return matrix
        self.compressed += 1
        self.bytes[0] += matrix.nbytes
        self.bytes[1] += smaller.nbytes
        self.squares[0] += error
        self.squares[1] += size
        return smaller

    def describe_cost(self) -> str:
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
