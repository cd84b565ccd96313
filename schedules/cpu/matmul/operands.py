"""A and B of a matmul in memory: the offsets of their elements."""

from __future__ import annotations

from tvm import tirx

from lowering.tensorir.expressions import Expr, flatten_index, substitute, uses

from ...reading.matmul import Matmul
from .results import MatmulResults, Memory


class MatmulOperands:
    """The operands A and B of a matmul.

    Offsets are expressions of the matmul's batch axes, row m of M, step k and column j (results.py).
    """

    def __init__(self, results: MatmulResults, matmul: Matmul) -> None:
        self.results, self.matmul = results, matmul
        self.k, self.depth = matmul.k.var, matmul.k.extent
        results.facts.bind(self.k, 0, self.depth)
        indices = [substitute(index, results.point) for index in matmul.a.indices]
        self.a_offset = results.simplify(flatten_index(matmul.a.source.shape, indices))
        self.b_offset = results.simplify(flatten_index(matmul.b.source.shape, matmul.b.indices))

    def bind_memory(self, memory: Memory) -> None:
        """Bind the function's tensors, declared at the IRBuilder's insertion point."""
        self.memory, self.a, self.b = memory, memory[self.matmul.a.source], memory[self.matmul.b.source]

    def stride(self, position: Expr, var: tirx.Var) -> Expr:
        """Return the number of elements between successive values of `var`."""
        return self.results.simplify(substitute(position, {var: var + 1}) - position)

    def is_linear(self, position: Expr, var: tirx.Var) -> bool:
        """Return whether elements at successive values of `var` have a constant stride."""
        return not uses(self.stride(position, var), {var})
