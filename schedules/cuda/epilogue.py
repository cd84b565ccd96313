"""What becomes of the sums of products: bias, activation, residual, casts, at chunks of a row of C, stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx

from lowering.tensorir.expressions import Expr, offset, substitute

from ..reading.values import Evaluator, flat_view
from .chunks import Row, evaluate, result_registers, store
from .matmul_reader import Matmuls
from .ptx import let, put

Sum = Callable[[Expr], Expr]
"""Of a matmul, at a column of the chunk."""


HALF = 8
"""Columns of C, successive ones, that the small-M kernel has in each half of a block."""


class Epilogue:
    """Written where the IRBuilder stands; `memory` are the function's tensors as vectors.

    Blocks of few rows have columns `first(n)` to `first(n)` + 7, and as many `apart` from there.
    """

    apart = HALF

    def __init__(self, matmuls: Matmuls) -> None:
        self.matmuls, facts = matmuls, matmuls.facts
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, matmuls.func.params)}
        self.row = Row(facts, matmuls.j, matmuls.columns)
        group = matmuls.group
        point = [facts.simplify(substitute(i, matmuls.point)) for i in group.matmuls[0].stage.indices]
        self.sums = [tirx.Var(f"sum{n}", matmul.acc) for n, matmul in enumerate(group.matmuls)]
        known = {matmul.stage.output: [(point, var)] for matmul, var in zip(group.matmuls, self.sums)}
        wanted = [tirx.BufferLoad(output, point) for output in group.outputs]
        stored = [output.dtype for output in group.outputs]
        self.places = [facts.simplify(offset(output.shape, point)) for output in group.outputs]
        self.program = Evaluator.of(matmuls.stages, self.memory).program(wanted, facts, known, stored, rounds=False)
        self.width = self.row.width(self.places)

    def store(self, where: Mapping[tirx.Var, Expr], row: Expr, column: Expr, sums: Sequence[Sum]) -> None:
        """C at a row and `width` columns from that one on, all of which exist. where: the batch axes."""
        values = {**where, self.matmuls.m: let(row.astype("int64"))}
        first = let(column.astype("int64"))
        results = result_registers(self.program, len(self.places), self.width)

        def keep(x: Expr, found: list[Expr]) -> None:
            for register, result in zip(results, found):
                put(register, x, result)

        evaluate(self.row, self.program, self.width, values, first, keep, dict(zip(self.sums, sums)))
        for output, place, register in zip(self.matmuls.group.outputs, self.places, results):
            at = let(substitute(place, {**values, self.matmuls.j: first}))
            self.put(output, at, register)

    def put(self, output: tirx.Buffer, at: Expr, chunk: tirx.Buffer) -> None:
        """Stores a chunk of an output, at the place of its first element in memory: registers."""
        store(self.memory[output], at, chunk)

    def first(self, number: Expr) -> Expr:
        """The first column of a block of few rows."""
        return number * (2 * HALF)


class Ends:
    """What becomes of the results of matmuls: they are stored."""

    def epilogue(self, matmuls: Matmuls) -> Epilogue:
        return Epilogue(matmuls)

    def behind(self) -> None:
        """Launches behind kernels whose results have been stored."""


def row_of(sums: tirx.Buffer, start: Expr | int) -> Sum:
    """Sums that lie one behind the other."""
    return lambda x: sums[start + x]
