"""The matrices of a product in memory: where their elements are, and what becomes of the sums."""

from __future__ import annotations

from collections.abc import Callable

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.expressions import Expr, offset, substitute, uses
from lowering.facts import Facts

from .loops import unravel, vector_loop, volume
from .product import Product
from .stages import Axis, Stage
from .values import Evaluator, View, flat_view
from .vector import Machine, fixed, prefetch

LINE = 64  # bytes of a cache line

Values = dict[tirx.Var, Expr]
"""What free variables are where code is written."""


class Operands:
    """Offsets and conditions are expressions of the product's batch axes, row m of M, k and column j.

    c is the number of a column among those that a kernel has the sums of.
    """

    def __init__(self, func: tirx.PrimFunc, stages: list[Stage], product: Product, cpu: Machine) -> None:
        self.func, self.stages, self.product, self.cpu = func, stages, product, cpu
        self.lanes = cpu.lanes("float32")
        self.facts = Facts.of(func)
        self.m, self.c = (tirx.Var(name, "int64") for name in ("m", "c"))
        self.j, self.k = product.j.var, product.k.var
        self.batch, self.rows = volume(product.batch), volume(product.rows)
        self.columns, self.depth = product.j.extent, product.k.extent
        for axis in (*product.batch, Axis(self.m, self.rows), product.j, product.k):
            self.facts.bind(axis.var, 0, axis.extent)
        self.point = {axis.var: value for axis, value in zip(product.rows, unravel(self.m, product.rows))}
        self.a_offset = self.simplify(substitute(offset(product.a.source.shape, product.a.indices), self.point))
        self.b_offset = self.simplify(offset(product.b.source.shape, product.b.indices))

    def simplify(self, expr: Expr) -> Expr:
        return self.facts.simplify(expr)

    def stride(self, position: Expr, var: tirx.Var) -> Expr:
        return self.simplify(substitute(position, {var: var + 1}) - position)

    def is_linear(self, position: Expr, var: tirx.Var) -> bool:
        """Whether elements at successive values of `var` are equally far apart."""
        return not uses(self.stride(position, var), {var})

    def open(self) -> None:
        """Declares the buffers' memory where the IRBuilder stands."""
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
        self.a, self.b = memory[self.product.a.source], memory[self.product.b.source]
        self.outputs = {s.output: memory.pop(s.output) for s in self.stages if s.output in memory}
        self.inputs = {buffer: View(flat) for buffer, flat in memory.items()}

    def in_batch(self, index: Expr) -> Values:
        """The batch axes at the batch's product of this number."""
        axes = self.product.batch
        return {axis.var: fixed(value) for axis, value in zip(axes, unravel(index, axes))}

    def ask_for_output(self, values: Values, row: Expr, height: Expr, column: Expr, columns: int) -> None:
        """Prefetches the lines that so many rows and columns of C will be stored to, while they are summed up."""
        where = {**self.point, self.j: column}
        for output, memory in self.outputs.items():
            position = self.simplify(offset(output.shape, [substitute(i, where) for i in self.stages[0].indices]))
            with T.serial(height) as i:
                start = fixed(substitute(position, {**values, self.m: row + i, self.c: tirx.const(0, "int64")}))
                for c in range(0, columns, LINE // DataType(output.dtype).itemsize):
                    prefetch(memory, start + c, level=1, write=True)

    def epilogue(self, values: Values, sums: tirx.Buffer, start: Expr, row: Expr, column: Expr, columns: Expr) -> None:
        """What the stages make of a row of C, stored. Its columns `column`, in terms of c, are sums[start + c]."""
        product = self.stages[0]
        where = {**self.point, self.j: column}
        point = [self.simplify(substitute(index, where)) for index in product.indices]
        known = {product.output: [(point, sums[start + self.c])]}
        results = [tirx.BufferLoad(output, point) for output in self.outputs]
        positions = [self.simplify(offset(output.shape, point)) for output in self.outputs]
        dtypes = [output.dtype for output in self.outputs]
        program = Evaluator(self.stages, self.inputs).program([*results, *positions], self.facts, known, dtypes)
        body = program.before_loop(self.c, {**values, self.m: row})

        def element(width: int) -> Callable[[Expr, Expr], None]:
            write = body(width)

            def store_all(c: Expr, lane: Expr) -> None:
                found = write(c, lane)
                for memory, value, position in zip(self.outputs.values(), found, found[len(results) :]):
                    T.buffer_store(memory, value, [position])

            return store_all

        vector_loop(columns, self.lanes if program.vectorizable(self.c) else 1, element)
