"""A and B of a matmul in memory: where their elements are."""

from __future__ import annotations

from tvm import tirx

from lowering.tensorir.expressions import Expr, offset, substitute, uses

from ..reading.matmul import Matmul
from .results import Memory, Results


class Operands:
    """Offsets are expressions of the matmul's batch axes, row m of M, step k and column j (results.py)."""

    def __init__(self, results: Results, matmul: Matmul) -> None:
        self.results, self.matmul = results, matmul
        self.k, self.depth = matmul.k.var, matmul.k.extent
        results.facts.bind(self.k, 0, self.depth)
        place = [substitute(index, results.point) for index in matmul.a.indices]
        self.a_offset = results.simplify(offset(matmul.a.source.shape, place))
        self.b_offset = results.simplify(offset(matmul.b.source.shape, matmul.b.indices))

    def open(self, memory: Memory) -> None:
        """The function's tensors, declared where the IRBuilder stands."""
        self.memory, self.a, self.b = memory, memory[self.matmul.a.source], memory[self.matmul.b.source]

    def stride(self, position: Expr, var: tirx.Var) -> Expr:
        """Elements between those at successive values of `var`."""
        return self.results.simplify(substitute(position, {var: var + 1}) - position)

    def is_linear(self, position: Expr, var: tirx.Var) -> bool:
        """Whether elements at successive values of `var` are equally far apart."""
        return not uses(self.stride(position, var), {var})
