"""Weights of grouped matmuls (tensorir/grouped.py): matrices side by side, each of whole panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax, te

from ..importing.quantized import Quantized
from ..tensorir.grouped import GROUPS, grouped_matmul
from .convolutions import OUT_ELEMENTWISE_FUSABLE
from .panels import Element


@dataclass(frozen=True)
class GroupedCall:
    """A call of a grouped matmul: its rows, the table of their matrices, and the matrices, `columns` wide each."""

    rows: relax.Expr
    table: relax.Expr
    matrices: relax.Expr
    groups: int
    columns: int

    def emit(self, builder: relax.BlockBuilder, parts: Sequence[relax.Var], element: Element, nr: int) -> relax.Expr:
        """Emit the call with the parts of matrices that are padded to nr columns, of which `element` reads one."""

        def compute(x: te.Tensor, table: te.Tensor, *parts: te.Tensor) -> te.Tensor:
            width = _padded(self.columns, nr)
            return grouped_matmul(x, table, self.groups, self.columns, width, lambda k, j: element(list(parts), k, j))

        return builder.call_te(
            compute,
            self.rows,
            self.table,
            *parts,
            primfunc_name_hint="grouped_matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def pad(self, matrix: np.ndarray | Quantized, nr: int) -> np.ndarray | Quantized:
        """Return the matrices [K, groups * columns] with zeros after each, up to a multiple of nr columns."""
        if self.columns % nr == 0:
            return matrix
        if isinstance(matrix, np.ndarray):
            return self._pad(matrix, nr)
        by_column = matrix.block[1]
        scales, zeros = (
            None if values is None else self._pad(values.repeat(by_column, axis=1)[:, : matrix.shape[1]], nr)
            for values in (matrix.scales, matrix.zeros)
        )
        assert scales is not None
        block = (matrix.block[0], 1)
        return dataclasses.replace(matrix, codes=self._pad(matrix.codes, nr), scales=scales, zeros=zeros, block=block)

    def _pad(self, values: np.ndarray, nr: int) -> np.ndarray:
        rows, width = len(values), _padded(self.columns, nr)
        padded = np.zeros((rows, self.groups, width), values.dtype)
        padded[:, :, : self.columns] = values.reshape(rows, self.groups, self.columns)
        return padded.reshape(rows, -1)


def read_grouped(mod: tvm.IRModule, call: relax.Call) -> GroupedCall | None:
    """Return the call as one of a grouped matmul whose matrices are not packed, None for any other call."""
    if call.op != tvm.ir.Op.get("relax.call_tir"):
        return None
    attributes = mod[call.args[0]].attrs
    if GROUPS not in attributes:
        return None
    rows, table, matrices, *_ = call.args[1].fields  # sizes come after them
    return GroupedCall(rows, table, matrices, int(attributes[GROUPS]), int(call.ty.shape[1]))


def _padded(columns: int, nr: int) -> int:
    return -(-columns // nr) * nr
