"""C of a group of matmuls: its rows and columns, and the epilogue that is applied to the accumulators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import DataType, tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, flatten_index, substitute
from lowering.tensorir.facts import Facts

from ...reading.matmul import MatmulGroup
from ...reading.selection import Selection
from ...reading.stages import Axis, Stage, count_points, unravel
from ...reading.values import Evaluator
from ..elementwise.loop_body import hoist_before_loop, is_vectorizable
from ..elementwise.loops import emit_vector_loop
from ..primitives.fast_math import expand
from ..primitives.vector import LINE, CpuFeatures, let, prefetch

Memory = Mapping[tirx.Buffer, tirx.Buffer]
"""A function's tensors as flat buffers of their elements (`flat_view`)."""

Values = dict[tirx.Var, Expr]
"""Values of free variables where code is emitted."""


class MatmulResults:
    """The output C of a group of matmuls.

    Conditions and offsets are expressions of the group's batch axes, row m of M and column j. c is the index of a
    column among those that a kernel accumulates, such as those of panel `panel` of B.
    """

    def __init__(
        self,
        func: tirx.PrimFunc,
        stages: list[Stage],
        group: MatmulGroup,
        cpu: CpuFeatures,
        selection: Selection | None = None,
    ) -> None:
        self.stages, self.group, self.cpu, self.selection = stages, group, cpu, selection
        self.lanes = cpu.lanes(group.acc)
        self.facts = Facts.of(func)
        first = group.matmuls[0]
        self.m, self.c, self.panel = (tirx.Var(name, "int64") for name in ("m", "c", "panel"))
        self.j = first.j.var
        self.batch_axes = first.batch
        self.batch, self.rows, self.columns = count_points(first.batch), count_points(first.rows), first.j.extent
        for axis in (*first.batch, Axis(self.m, self.rows), first.j):
            self.facts.bind(axis.var, 0, axis.extent)
        if selection is not None:
            self.facts.bind(selection.group, 0, tirx.const(selection.count, "int64"))
        self.point = {axis.var: value for axis, value in zip(first.rows, unravel(self.m, first.rows))}

    def simplify(self, expr: Expr) -> Expr:
        return self.facts.simplify(expr)

    def bind_batch(self, index: Expr) -> Values:
        """Return the values of the batch axes for the matmul of this index in the batch."""
        return {axis.var: let(value) for axis, value in zip(self.batch_axes, unravel(index, self.batch_axes))}

    def use_axes(self) -> None:
        """Let a row of C be a point of the matmul's axes from now on, whose values a kernel gives, and not number m."""
        self.point = {}
        for axis in self.group.matmuls[0].rows:
            self.facts.bind(axis.var, 0, axis.extent)

    def _indices(self, column: Expr) -> list[Expr]:
        """Return the indices in C of row m and this column."""
        where = {**self.point, self.j: column}
        return [self.simplify(substitute(index, where)) for index in self.group.matmuls[0].stage.indices]

    def prefetch_rows(
        self, memory: Memory, values: Values, row: Expr, height: Expr, column: Expr, columns: int
    ) -> None:
        """Prefetch the lines of `height` rows and `columns` columns of C for writing, while they are accumulated."""
        for output in self.group.outputs:
            position = self.simplify(flatten_index(output.shape, self._indices(column)))
            with T.serial(height) as i:
                start = let(substitute(position, {**values, self.m: row + i, self.c: tirx.const(0, "int64")}))
                for c in range(0, columns, LINE // DataType(output.dtype).itemsize):
                    prefetch(memory[output], start + c, level=1, write=True)

    def store(
        self,
        memory: Memory,
        values: Values,
        accumulators: Sequence[tuple[tirx.Buffer, Expr]],
        row: Expr,
        column: Expr,
        columns: Expr,
    ) -> None:
        """Emit the epilogue of one row of C, and store its results.

        Column `column`, in terms of c, is buffer[start + c] of the (buffer, start) of each matmul.
        """
        point = self._indices(column)
        bindings = {
            matmul.stage.output: [(point, buffer[start + self.c])]
            for matmul, (buffer, start) in zip(self.group.matmuls, accumulators)
        }
        outputs = self.group.outputs
        results = [tirx.BufferLoad(output, point) for output in outputs]
        positions = [self.simplify(flatten_index(output.shape, point)) for output in outputs]
        dtypes = [output.dtype for output in outputs]
        evaluator = Evaluator.of(self.stages, memory, expand)
        program = evaluator.program([*results, *positions], self.facts, bindings, dtypes)
        body = hoist_before_loop(program, self.c, {**values, self.m: row})

        def element(width: int) -> Callable[[Expr, Expr], None]:
            write = body(width)

            def store_all(c: Expr, lane: Expr) -> None:
                elements = write(c, lane)
                for output, value, position in zip(outputs, elements, elements[len(results) :]):
                    T.buffer_store(memory[output], value, [position])

            return store_all

        emit_vector_loop(columns, self.lanes if is_vectorizable(program, self.c) else 1, element)
