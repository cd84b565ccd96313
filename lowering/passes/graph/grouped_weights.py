"""Weights of grouped matmuls (tensorir/grouped_matmul.py): concatenated matrices, each in whole panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te

from ...importing.quantized_matrix import QuantizedMatrix
from ...tensorir.grouped_matmul import GROUPS, grouped_matmul


@dataclass(frozen=True)
class GroupedCall:
    """A call of a grouped matmul: its rows, the table of their matrices, and the matrices, each `columns` wide."""

    rows: relax.Expr
    table: relax.Expr
    matrices: relax.Expr
    groups: int
    columns: int

    def compute(self, x: te.Tensor, table: te.Tensor, element: Callable[..., tvm.ir.Expr], *, nr: int) -> te.Tensor:
        """Return the matmul with matrices padded to nr columns, of elements element(k, j)."""
        width = _round_up(self.columns, nr)
        return grouped_matmul(x, table, self.groups, self.columns, width, element)

    def pad(self, matrix: np.ndarray | QuantizedMatrix, nr: int) -> np.ndarray | QuantizedMatrix:
        """Return the matrices [K, groups * columns] with zeros after each, up to a multiple of nr columns."""
        if self.columns % nr == 0:
            return matrix
        if isinstance(matrix, np.ndarray):
            return self._pad(matrix, nr)
        by_column = matrix.block[1]
        scales, zeros = (
            None if values is None else self._pad(values.repeat(by_column, axis=1)[:, : matrix.shape[1]], nr)
            for values in (matrix.scales, matrix.zero_points)
        )
        assert scales is not None
        block = (matrix.block[0], 1)
        return dataclasses.replace(
            matrix, values=self._pad(matrix.values, nr), scales=scales, zero_points=zeros, block=block
        )

    def _pad(self, values: np.ndarray, nr: int) -> np.ndarray:
        rows, width = len(values), _round_up(self.columns, nr)
        padded = np.zeros((rows, self.groups, width), values.dtype)
        padded[:, :, : self.columns] = values.reshape(rows, self.groups, self.columns)
        return padded.reshape(rows, -1)


def read_grouped_call(mod: tvm.IRModule, call: relax.Call) -> GroupedCall | None:
    """Return the call of a grouped matmul whose matrices are not packed, None for other calls."""
    if call.op != tvm.ir.Op.get("relax.call_tir"):
        return None
    attributes = mod[call.args[0]].attrs
    if GROUPS not in attributes:
        return None
    rows, table, matrices, *_ = call.args[1].fields  # followed by sizes
    return GroupedCall(rows, table, matrices, int(attributes[GROUPS]), int(call.ty.shape[1]))


def _round_up(columns: int, nr: int) -> int:
    return -(-columns // nr) * nr
