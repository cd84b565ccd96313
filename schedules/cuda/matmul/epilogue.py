"""Epilogue of matmuls: bias, activation, residual and casts on chunks of a row of C, which are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx

from lowering.tensorir.expressions import Expr, flatten_index, substitute

from ...reading.values import Evaluator, flat_view
from ..elementwise.chunks import ChunkedRow, alloc_result_registers, evaluate_chunk, store_values
from ..primitives.ptx import let, store_element
from .matmul_reader import Matmuls

Accumulator = Callable[[Expr], Expr]
"""The accumulator of a matmul at a column of the chunk."""


HALF_COLUMNS = 8
"""Successive columns of C that the small-M kernel has in each half of a block."""


class Epilogue:
    """The code of an epilogue, written at the position of the IRBuilder.

    `memory` maps the function's tensors to flat views. Blocks of the small-M kernel have columns `first(n)` to
    `first(n)` + 7, and as many at a distance of `apart` columns.
    """

    apart = HALF_COLUMNS

    def __init__(self, matmuls: Matmuls) -> None:
        self.matmuls, facts = matmuls, matmuls.facts
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, matmuls.func.params)}
        self.row = ChunkedRow(facts, matmuls.j, matmuls.columns)
        group = matmuls.group
        point = [facts.simplify(substitute(i, matmuls.point)) for i in group.matmuls[0].stage.indices]
        self.accumulators = [tirx.Var(f"sum{n}", matmul.acc) for n, matmul in enumerate(group.matmuls)]
        bindings = {matmul.stage.output: [(point, var)] for matmul, var in zip(group.matmuls, self.accumulators)}
        loads = [tirx.BufferLoad(output, point) for output in group.outputs]
        stored = [output.dtype for output in group.outputs]
        self.offsets = [facts.simplify(flatten_index(output.shape, point)) for output in group.outputs]
        self.program = Evaluator.of(matmuls.stages, self.memory).program(loads, facts, bindings, stored, rounds=False)
        self.width = self.row.width(self.offsets)

    def store_columns(
        self, batch_indices: Mapping[tirx.Var, Expr], row: Expr, column: Expr, accumulators: Sequence[Accumulator]
    ) -> None:
        """Store C at a row and `width` columns from `column` on, all of which exist."""
        bindings = {**batch_indices, self.matmuls.m: let(row.astype("int64"))}
        first = let(column.astype("int64"))
        results = alloc_result_registers(self.program, len(self.offsets), self.width)

        def store_results(x: Expr, values: list[Expr]) -> None:
            for register, result in zip(results, values):
                store_element(register, x, result)

        evaluate_chunk(
            self.row,
            self.program,
            self.width,
            bindings,
            first,
            store_results,
            dict(zip(self.accumulators, accumulators)),
        )
        for output, address, register in zip(self.matmuls.group.outputs, self.offsets, results):
            at = let(substitute(address, {**bindings, self.matmuls.j: first}))
            self.store_chunk(output, at, register)

    def store_chunk(self, output: tirx.Buffer, at: Expr, chunk: tirx.Buffer) -> None:
        """Store a chunk of an output from registers; `at` is the offset of its first element in memory."""
        store_values(self.memory[output], at, chunk)

    def first(self, number: Expr) -> Expr:
        """Return the first column of a small-M block."""
        return number * (2 * HALF_COLUMNS)


class EpilogueFactory:
    """Creates the epilogues of matmuls: here they store the results."""

    def create_epilogue(self, matmuls: Matmuls) -> Epilogue:
        return Epilogue(matmuls)

    def launch_trailing(self) -> None:
        """Emit the launches that follow kernels whose results have been stored."""


def index_accumulators(accumulators: tirx.Buffer, start: Expr | int) -> Accumulator:
    """Return accessors to accumulators that are stored one after another."""
    return lambda x: accumulators[start + x]
