"""Products in which each row chooses one of several matrices by a table: grouped GEMM.

Before: C[r, j] = sum over k of A[r, k] * B[table[r], k, j], a batch of products of one row. After: the product of all
rows that choose the same matrix, whose number is a variable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir, tirx

from lowering.tensorir.expressions import Expr, rewrite

from .product import Group, Product


@dataclass(frozen=True)
class Selection:
    """`group` stands for what is read of the table: the number of a matrix."""

    table: tirx.Buffer
    group: tirx.Var

    def apply(self, group: Group) -> Group:
        """Return the products of the rows of one matrix: what was their batch are their rows."""
        return dataclasses.replace(group, products=tuple(map(self._apply, group.products)))

    def _apply(self, product: Product) -> Product:
        codes = product.codes
        if codes is not None:
            zero = None if codes.zero is None else self._select(codes.zero)
            codes = dataclasses.replace(
                codes, load=self._select(codes.load), scale=self._select(codes.scale), zero=zero
            )
        return dataclasses.replace(
            product, b=self._select(product.b), batch=(), rows=product.batch, codes=codes, selector=None
        )

    def _select(self, load: ir.TensorLoad) -> ir.TensorLoad:
        def replace(node: Expr) -> Expr | None:
            return self.group if isinstance(node, ir.TensorLoad) and node.source.same_as(self.table) else None

        return rewrite(load, replace)


def read_selection(groups: Sequence[Group]) -> Selection | None:
    """Return how rows choose their matrices, in all products alike; None where they do not."""
    selector = groups[0].products[0].selector
    return None if selector is None else Selection(selector.source, tirx.Var("group", "int64"))
