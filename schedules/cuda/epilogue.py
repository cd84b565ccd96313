"""What becomes of the sums of products: bias, activation, residual, casts, at chunks of a row of C, stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx

from lowering.tensorir.expressions import Expr, offset, substitute

from ..reading.values import Evaluator, flat_view
from .chunks import Row, evaluate, result_registers, store
from .products import Products
from .ptx import fixed, put

Sum = Callable[[Expr], Expr]
"""Of a product, at a column of the chunk."""


HALF = 8
"""Columns of C, successive ones, that the kernel for few rows has in each half of a block."""


class Epilogue:
    """Written where the IRBuilder stands; `memory` are the function's tensors as vectors.

    Blocks of few rows have columns `first(n)` to `first(n)` + 7, and as many `apart` from there.
    """

    apart = HALF

    def __init__(self, products: Products) -> None:
        self.products, facts = products, products.facts
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, products.func.params)}
        self.row = Row(facts, products.j, products.columns)
        group = products.group
        point = [facts.simplify(substitute(i, products.point)) for i in group.products[0].stage.indices]
        self.sums = [tirx.Var(f"sum{n}", product.acc) for n, product in enumerate(group.products)]
        known = {product.stage.output: [(point, var)] for product, var in zip(group.products, self.sums)}
        wanted = [tirx.BufferLoad(output, point) for output in group.outputs]
        stored = [output.dtype for output in group.outputs]
        self.places = [facts.simplify(offset(output.shape, point)) for output in group.outputs]
        self.program = Evaluator.of(products.stages, self.memory).program(wanted, facts, known, stored, rounds=False)
        self.width = self.row.width(self.places)

    def store(self, where: Mapping[tirx.Var, Expr], row: Expr, column: Expr, sums: Sequence[Sum]) -> None:
        """C at a row and `width` columns from that one on, all of which exist. where: the batch axes."""
        values = {**where, self.products.m: fixed(row.astype("int64"))}
        first = fixed(column.astype("int64"))
        results = result_registers(self.program, len(self.places), self.width)

        def keep(x: Expr, found: list[Expr]) -> None:
            for register, result in zip(results, found):
                put(register, x, result)

        evaluate(self.row, self.program, self.width, values, first, keep, dict(zip(self.sums, sums)))
        for output, place, register in zip(self.products.group.outputs, self.places, results):
            at = fixed(substitute(place, {**values, self.products.j: first}))
            self.put(output, at, register)

    def put(self, output: tirx.Buffer, at: Expr, chunk: tirx.Buffer) -> None:
        """Stores a chunk of an output, at the place of its first element in memory: registers."""
        store(self.memory[output], at, chunk)

    def first(self, number: Expr) -> Expr:
        """The first column of a block of few rows."""
        return number * (2 * HALF)


class Ends:
    """What becomes of the results of products: they are stored."""

    def epilogue(self, products: Products) -> Epilogue:
        return Epilogue(products)

    def behind(self) -> None:
        """Launches behind kernels whose results have been stored."""


def row_of(sums: tirx.Buffer, start: Expr | int) -> Sum:
    """Sums that lie one behind the other."""
    return lambda x: sums[start + x]
