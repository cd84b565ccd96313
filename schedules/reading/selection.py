"""Matmuls in which each row chooses one of several matrices by a table: grouped GEMM.

Before: C[r, j] = sum over k of A[r, k] * B[table[r], k, j], a batch of matmuls of one row. After: the matmul of all
rows that choose the same matrix, whose number is a variable.
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
    """`group` stands for the number of a matrix, one of `count`: the nearest one to what is read of the table."""

    table: tirx.Buffer
    group: tirx.Var
    count: int

    def nearest(self, number: Expr) -> Expr:
        """Return the number of a matrix for what is read of the table, int64."""
        return tirx.max(tirx.min(number, tirx.const(self.count - 1, "int64")), tirx.const(0, "int64"))

    def apply(self, group: MatmulGroup) -> MatmulGroup:
        """Return the matmuls of the rows of one matrix: what was their batch are their rows."""
        return dataclasses.replace(group, matmuls=tuple(map(self._apply, group.matmuls)))

    def _apply(self, matmul: Matmul) -> Matmul:
        codes = matmul.quantization
        if codes is not None:
            zero = None if codes.zero is None else self._select(codes.zero)
            codes = dataclasses.replace(
                codes, load=self._select(codes.load), scale=self._select(codes.scale), zero=zero
            )
        return dataclasses.replace(
            matmul, b=self._select(matmul.b), batch=(), rows=matmul.batch, quantization=codes, selector=None
        )

    def _select(self, load: ir.TensorLoad) -> ir.TensorLoad:
        def replace(node: Expr) -> Expr | None:
            return self.group if _count(node, self.table) is not None else None

        return rewrite(load, replace)


def read_selection(groups: Sequence[MatmulGroup]) -> Selection | None:
    """Return how rows choose their matrices, in all matmuls alike; None where they do not."""
    first = groups[0].matmuls[0]
    if first.selector is None:
        return None
    table = first.selector.source
    matmuls = [matmul for group in groups for matmul in group.matmuls]
    codes = [matmul.quantization for matmul in matmuls if matmul.quantization is not None]
    loads = [*(p.b for p in matmuls), *(load for c in codes for load in (c.load, c.scale, c.zero) if load is not None)]
    indices = (index for load in loads for index in load.indices)
    counts = {n for index in indices for node in walk(index) if (n := _count(node, table)) is not None}
    return Selection(table, tirx.Var("group", "int64"), *counts) if len(counts) == 1 else None


def _count(node: Expr, table: tirx.Buffer) -> int | None:
    """Return of how many numbers this is the nearest one to what is read of the table; None for anything else."""
    if not isinstance(node, prim.Max) or not is_int(node.b, 0) or not isinstance(node.a, prim.Min):
        return None
    load, last = node.a.a, node.a.b
    is_read = isinstance(load, ir.TensorLoad) and load.source.same_as(table)
    return last.value + 1 if is_read and isinstance(last, tirx.IntImm) else None
