"""FusedEpilogues of matmuls (reading/epilogues.py): by the small-M blocks themselves, behind other kernels by a
launch.

A rotation reads two elements of a head that are D / 2 apart. Blocks of few rows have 16 columns: eight of the first
half of a head, and those that they are rotated with. Results that have epilogues are stored all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, offset, substitute

from ..reading.epilogues import FusedEpilogue
from ..reading.stages import Axis, Stage
from ..reading.values import Evaluator, flat_view
from .chunks import CHUNK, Row, evaluate, result_registers, store
from .computed_rows import CacheRows, row_size
from .elementwise import Chunks
from .epilogue import HALF, Ends, Epilogue, Sum
from .matmul_reader import Matmuls
from .ptx import let, put
from .threads import ThreadTiles, each

Put = Callable[[tirx.Buffer, Expr, tirx.Buffer], None]
"""Stores a chunk of a tensor, at the place of its first element in memory: registers."""

_ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3))
"""Axes of what is made of heads [batch, rows, H, D], by that of heads: as they are, or heads first."""


class FusedEpilogues(Ends):
    """Written where the IRBuilder stands."""

    def __init__(self, func: tirx.PrimFunc, epilogues: Sequence[FusedEpilogue], tiles: ThreadTiles) -> None:
        self.func, self.epilogues, self.tiles = func, epilogues, tiles

    def epilogue(self, matmuls: Matmuls) -> Epilogue:
        """Raises ValueError where an epilogue is not made of pairs that are D / 2 apart, or results are several."""
        outputs = matmuls.group.outputs
        epilogue = next((epilogue for epilogue in self.epilogues if epilogue.rows in outputs), None)
        if epilogue is None:
            return Epilogue(matmuls)
        if len(outputs) > 1 or len(matmuls.group.matmuls) > 1 or matmuls.batch_axes:
            raise ValueError("An epilogue is of one result of one matmul.")
        if epilogue.update is not None and row_size(epilogue.update.record) is None:
            raise ValueError("Rows of the cache are no whole chunks.")
        into = self.into(epilogue)
        return PairedEpilogue(matmuls, epilogue, into) if epilogue.stages else UpdatingEpilogue(matmuls, into)

    def behind(self) -> None:
        """A launch for all epilogues, which read the results where they were stored."""
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
        stages = [epilogue.stages or [_itself(epilogue.rows)] for epilogue in self.epilogues]
        parts = [Chunks(self.func, own, own[-1:], memory) for own in stages]
        count = sum((part.count for part in parts[1:]), parts[0].count)
        into = [self.into(epilogue) for epilogue in self.epilogues]

        def emit(n: int, number: Expr) -> None:
            """The code of the chunk with that number, behind those of the first n epilogues."""

            def own() -> None:
                parts[n].emit(number, lambda stage, at, chunk: into[n](stage.output, at, chunk))

            if n == len(parts) - 1:
                own()
                return
            with T.If(number < parts[n].count):
                with T.Then():
                    own()
                with T.Else():
                    emit(n + 1, let(number - parts[n].count))

        with each(count, self.tiles) as number:
            emit(0, number)

    def into(self, epilogue: FusedEpilogue) -> Put:
        """What stores chunks of what an epilogue makes."""
        if epilogue.update is not None:
            cache = CacheRows(epilogue.update.bound())
            return lambda _, at, chunk: cache.put(at, chunk)
        memory = flat_view(epilogue.stages[-1].output)
        return lambda _, at, chunk: store(memory, at, chunk)


class UpdatingEpilogue(Epilogue):
    """Stores results, and what is made of them."""

    def __init__(self, matmuls: Matmuls, into: Put) -> None:
        super().__init__(matmuls)
        self.into = into

    def put(self, output: tirx.Buffer, at: Expr, chunk: tirx.Buffer) -> None:
        super().put(output, at, chunk)
        self.into(output, at, chunk)


class PairedEpilogue(Epilogue):
    """Of columns that are half a head apart: stores both, and what is made of them."""

    def __init__(self, matmuls: Matmuls, epilogue: FusedEpilogue, into: Put) -> None:
        self.matmuls, self.epilogue, self.into = matmuls, epilogue, into
        *_, H, D = epilogue.stages[0].output.shape
        if not isinstance(D, tirx.IntImm) or D.value % (2 * CHUNK):
            raise ValueError("Heads have no halves of whole chunks.")
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, matmuls.func.params)}
        self.head_dim, self.apart, self.facts = D.value, D.value // 2, matmuls.facts.copy()
        self.h, self.i = tirx.Var("h", "int64"), tirx.Var("i", "int64")
        half = tirx.const(self.apart, "int64")
        self.facts.bind(self.h, 0, H)
        self.facts.bind(self.i, 0, half)
        self.row = Row(self.facts, self.i, half)
        self.sums = [tirx.Var(name, matmuls.group.acc) for name in ("low", "high")]
        outputs, points = self.find_program()
        self.outputs = outputs
        self.places = [self.facts.simplify(offset(x.shape, point)) for x, point in zip(outputs, points)]
        if self.row.width(self.places) != CHUNK:
            raise ValueError("Chunks of the result are apart.")
        self.width = 2 * HALF

    def find_program(self) -> tuple[list[tirx.Buffer], list[list[Expr]]]:
        """What is stored, and at which points: element i of head h, and that half a head from there."""
        epilogue, sums = self.epilogue, self.matmuls.group.matmuls[0].stage
        *rows, _ = [substitute(index, self.matmuls.point) for index in sums.indices]
        dims = [self.i, self.i + self.apart]
        columns = self.simplified([[*rows, self.h * self.head_dim + d] for d in dims])
        stages = [stage for stage in (*self.matmuls.stages, *epilogue.stages) if not stage.reduce]
        evaluator, made = Evaluator.of(stages, self.memory), epilogue.stages[-1].output
        shape = epilogue.stages[0].output.shape
        for order in _ORDERS:
            same = len(made.shape) == len(shape) == len(order)
            if not same or not all(prim.expr_deep_equal(made.shape[n], shape[k]) for n, k in enumerate(order)):
                continue
            points = self.simplified([[[*rows, self.h, d][k] for k in order] for d in dims])
            outputs, points = [epilogue.rows, epilogue.rows, made, made], [*columns, *points]
            wanted = [tirx.BufferLoad(*place) for place in zip(outputs, points)]
            stored = [output.dtype for output in outputs]
            try:
                known = {sums.output: list(zip(columns, self.sums))}
                self.program = evaluator.program(wanted, self.facts, known, stored, rounds=False)
            except KeyError:  # a sum that is no part of the pair
                continue
            return outputs, points
        raise ValueError("What is made of a head is made of other elements than pairs half of it apart.")

    def simplified(self, points: list[list[Expr]]) -> list[list[Expr]]:
        return [[self.facts.simplify(index) for index in point] for point in points]

    def first(self, number: Expr) -> Expr:
        per_head = self.apart // HALF
        return number // per_head * self.head_dim + number % per_head * HALF

    def store(self, where: Mapping[tirx.Var, Expr], row: Expr, column: Expr, sums: Sequence[Sum]) -> None:
        """Both halves, of which the first one begins at that column; `sums` has one behind the other."""
        first = let((column % self.head_dim).astype("int64"))
        head = let((column // self.head_dim).astype("int64"))
        values = {**where, self.matmuls.m: let(row.astype("int64")), self.h: head}
        results = result_registers(self.program, len(self.outputs), CHUNK)

        def keep(x: Expr, found: list[Expr]) -> None:
            for register, result in zip(results, found):
                put(register, x, result)

        (own,) = sums
        elements = {self.sums[0]: own, self.sums[1]: lambda x: own(x + HALF)}
        evaluate(self.row, self.program, CHUNK, values, first, keep, elements)
        for output, place, register in zip(self.outputs, self.places, results):
            at = let(substitute(place, {**values, self.i: first}))
            if output is self.epilogue.rows:
                self.put(output, at, register)
            else:
                self.into(output, at, register)


def _itself(rows: tirx.Buffer) -> Stage:
    """A stage whose output is what the rows are."""
    axes = tuple(Axis(tirx.Var(f"v{n}", "int64"), extent) for n, extent in enumerate(rows.shape))
    here = [axis.var for axis in axes]
    return Stage(tirx.decl_buffer(rows.shape, rows.dtype, "itself"), axes, (), None, tirx.BufferLoad(rows, here))
