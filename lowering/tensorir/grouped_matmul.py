"""Grouped matmul: each row of A times the matrix that a table assigns to it, one of several concatenated matrices."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, te, tirx

GROUPS = "lowering.groups"
"""Attribute of a function that is a grouped matmul of rows, table and matrices: the number of matrices."""


def grouped_matmul(
    x: te.Tensor, table: te.Tensor, groups: int, columns: int, width: int, element: Callable[..., ir.Expr]
) -> te.Tensor:
    """Return float32 [R, columns]: row r of x [R, K] times the matrix table[r], clamped to existing matrices.

    element(k, j) is in row k and column j of the concatenated matrices, each `width` wide.
    """
    k = te.reduce_axis((0, x.shape[1]), name="k")

    def compute(r: ir.Expr, j: ir.Expr) -> ir.Expr:
        group = tirx.max(tirx.min(table(r), tirx.const(groups - 1, "int64")), tirx.const(0, "int64"))
        return te.sum(x(r, k).astype("float32") * element(k, group * width + j), axis=k)

    return te.compute((x.shape[0], columns), compute, name="grouped_matmul")
