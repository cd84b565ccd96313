"""Grouped matmul: each row of A times the matrix that a table gives it, one of several side by side."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, te, tirx

GROUPS = "lowering.groups"
"""Attribute of a function that is a grouped matmul of the arguments rows, table and matrices: how many matrices."""


def grouped_matmul(
    x: te.Tensor, table: te.Tensor, groups: int, columns: int, width: int, element: Callable[..., ir.Expr]
) -> te.Tensor:
    """Return float32 [R, columns]: row r of x [R, K] times the matrix table[r], or the nearest one that there is.

    element(k, j) is in row k and column j of all matrices side by side, each `width` wide.
    """
    k = te.reduce_axis((0, x.shape[1]), name="k")

    def sum_of_products(r: ir.Expr, j: ir.Expr) -> ir.Expr:
        group = tirx.max(tirx.min(table(r), tirx.const(groups - 1, "int64")), tirx.const(0, "int64"))
        return te.sum(x(r, k).astype("float32") * element(k, group * width + j), axis=k)

    return te.compute((x.shape[0], columns), sum_of_products, name="grouped_matmul")
