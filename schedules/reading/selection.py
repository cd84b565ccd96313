"""Matmuls in which each row selects one of several matrices by a table: grouped GEMM.

Before: C[r, j] = sum over k of A[r, k] * B[table[r], k, j], a batch of matmuls of one row. After: the matmul of all
rows that select the same matrix, whose number is a variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim

from lowering.tensorir.expressions import Expr, is_int, rewrite, walk

from .matmul import Matmul, MatmulGroup


@dataclass(frozen=True)
class Selection:
    """A selection of one of `count` matrices by a table; `group` is the variable for the number of the matrix.

    The number is an element of the table, clamped to the valid ones.
    """

    table: tirx.Buffer
    group: tirx.Var
    count: int

    def clamp_group(self, number: Expr) -> Expr:
        """Return the number of a matrix for an element of the table, int64."""
        return tirx.max(tirx.min(number, tirx.const(self.count - 1, "int64")), tirx.const(0, "int64"))

    def apply(self, group: MatmulGroup) -> MatmulGroup:
        """Return the matmuls of the rows of one matrix: their batch axis becomes their row axis."""
        return dataclasses.replace(group, matmuls=tuple(map(self._apply, group.matmuls)))

    def _apply(self, matmul: Matmul) -> Matmul:
        quantization = matmul.quantization
        if quantization is not None:
            zero = None if quantization.zero is None else self._select(quantization.zero)
            quantization = dataclasses.replace(
                quantization, load=self._select(quantization.load), scale=self._select(quantization.scale), zero=zero
            )
        return dataclasses.replace(
            matmul, b=self._select(matmul.b), batch=(), rows=matmul.batch, quantization=quantization, selector=None
        )

    def _select(self, load: ir.TensorLoad) -> ir.TensorLoad:
        def replace(node: Expr) -> Expr | None:
            return self.group if _read_group_count(node, self.table) is not None else None

        return rewrite(load, replace)


def read_selection(groups: Sequence[MatmulGroup]) -> Selection | None:
    """Return how rows select their matrices, the same in all matmuls; None if they do not."""
    first = groups[0].matmuls[0]
    if first.selector is None:
        return None
    table = first.selector.source
    matmuls = [matmul for group in groups for matmul in group.matmuls]
    quantizations = [matmul.quantization for matmul in matmuls if matmul.quantization is not None]
    loads = [
        *(matmul.b for matmul in matmuls),
        *(load for q in quantizations for load in (q.load, q.scale, q.zero) if load is not None),
    ]
    indices = (index for load in loads for index in load.indices)
    counts = {n for index in indices for node in walk(index) if (n := _read_group_count(node, table)) is not None}
    return Selection(table, tirx.Var("group", "int64"), *counts) if len(counts) == 1 else None


def _read_group_count(node: Expr, table: tirx.Buffer) -> int | None:
    """Return the number of values to which this clamps an element of the table; None for anything else."""
    if not isinstance(node, prim.Max) or not is_int(node.b, 0) or not isinstance(node.a, prim.Min):
        return None
    load, last = node.a.a, node.a.b
    is_read = isinstance(load, ir.TensorLoad) and load.source.same_as(table)
    return last.value + 1 if is_read and isinstance(last, tirx.IntImm) else None
