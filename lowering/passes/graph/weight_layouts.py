"""How each kind of target stores the constant matrices of its matmuls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from schedules import CHUNK_BYTES, QUAD, CpuFeatures, choose_row_block, panel_width

from ...choices import Scheme
from ...importing.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True)
class PanelLayout:
    """Panels of some vectors of columns, for CPUs; the machine's dot products want pairs or quads of successive rows.

    Matrices with fewer than `min_columns` columns are dot products, which need no packing.
    """

    cpu: CpuFeatures
    min_columns: ClassVar[int] = 4
    packs_convolutions: ClassVar[bool] = True
    packs_int8: ClassVar[bool] = True
    function_name: ClassVar[str] = "packed_matmul"

    def choose_width(self, columns: int, lanes: int = 1) -> int:
        """Return the columns of a panel."""
        return panel_width(columns, self.cpu, "int32" if lanes == 4 else "float32")

    def choose_lanes(self, matrix: np.ndarray | QuantizedMatrix, x_dtype: str) -> int:
        """Return the successive rows of a matrix that are stored together."""
        if isinstance(matrix, QuantizedMatrix):
            has_quads = matrix.permits_int8_rows and choose_row_block(matrix.scale_block, self.cpu) > 0
            return QUAD if has_quads else 1
        if matrix.dtype == np.int8:
            return QUAD
        return 2 if self.cpu.bf16_dot and matrix.dtype.name == x_dtype == "bfloat16" else 1

    def is_packed(
        self, matrix: np.ndarray | QuantizedMatrix, x_dtype: str, steps: tuple[str, ...], scheme: Scheme | None
    ) -> bool:
        return True


@dataclass(frozen=True)
class ColumnLayout:
    """Panels of one column, for GPUs: kernels read a column's elements at successive k
    (schedules/cuda/matmul/small_m_matmul.py).

    A matrix is packed if tensor cores multiply its type, or if it is compressed or quantized: its values are then
    dequantized in the kernel. A weight that the model transposes itself is read without a copy (fold_transposes.py),
    unless it is compressed.
    """

    on_tensor_cores: Sequence[str]
    min_columns: ClassVar[int] = 1
    packs_convolutions: ClassVar[bool] = False
    packs_int8: ClassVar[bool] = False
    function_name: ClassVar[str] = "matmul"

    def choose_width(self, columns: int, lanes: int = 1) -> int:
        return 1

    def choose_lanes(self, matrix: np.ndarray | QuantizedMatrix, x_dtype: str) -> int:
        return 1

    def is_packed(
        self, matrix: np.ndarray | QuantizedMatrix, x_dtype: str, steps: tuple[str, ...], scheme: Scheme | None
    ) -> bool:
        """Return whether a matrix of a matmul with an x of that type is packed.

        Its name and transforms are steps, and scheme is how it may have been compressed.
        """
        is_compressed = scheme is not None and matrix.dtype == np.float16 != np.dtype(x_dtype)
        if isinstance(matrix, QuantizedMatrix) or is_compressed:
            return True
        is_aligned = matrix.shape[0] * matrix.dtype.itemsize % CHUNK_BYTES == 0
        return matrix.dtype.name == x_dtype and x_dtype in self.on_tensor_cores and is_aligned and len(steps) == 1
