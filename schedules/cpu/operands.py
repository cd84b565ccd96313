"""A and B of a product in memory: where their elements are."""

from __future__ import annotations

from tvm import tirx

from lowering.tensorir.expressions import Expr, offset, substitute, uses

from ..reading.product import Product
from .results import Memory, Results


class Operands:
    """Offsets are expressions of the product's batch axes, row m of M, step k and column j (results.py)."""

    def __init__(self, results: Results, product: Product) -> None:
        self.results, self.product = results, product
        self.k, self.depth = product.k.var, product.k.extent
        results.facts.bind(self.k, 0, self.depth)
        place = [substitute(index, results.point) for index in product.a.indices]
        self.a_offset = results.simplify(offset(product.a.source.shape, place))
        self.b_offset = results.simplify(offset(product.b.source.shape, product.b.indices))

    def open(self, memory: Memory) -> None:
        """The function's tensors, declared where the IRBuilder stands."""
        self.memory, self.a, self.b = memory, memory[self.product.a.source], memory[self.product.b.source]

    def stride(self, position: Expr, var: tirx.Var) -> Expr:
        """Elements between those at successive values of `var`."""
        return self.results.simplify(substitute(position, {var: var + 1}) - position)

    def is_linear(self, position: Expr, var: tirx.Var) -> bool:
        """Whether elements at successive values of `var` are equally far apart."""
        return not uses(self.stride(position, var), {var})
