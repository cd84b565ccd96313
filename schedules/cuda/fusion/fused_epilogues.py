"""Fused epilogues of matmuls (reading/epilogues.py): in the small-M blocks themselves, after other kernels by a launch.

A rotation reads two elements of a head that are D / 2 apart. Small-M blocks have 16 columns: eight of the first half of
a head, and those that they are rotated with. Results with epilogues are stored as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, flatten_index, substitute

from ...reading.epilogues import FusedEpilogue
from ...reading.stages import Axis, Stage
from ...reading.values import Evaluator, flat_view
from ..cache.cache_rows import CacheRows, row_size
from ..elementwise.chunks import CHUNK, ChunkedRow, alloc_result_registers, evaluate_chunk, store_values
from ..elementwise.elementwise import Chunks
from ..matmul.epilogue import HALF_COLUMNS, Accumulator, Epilogue, EpilogueFactory
from ..matmul.matmul_reader import Matmuls
from ..primitives.ptx import let, store_element
from ..primitives.threads import ThreadTiles, launch_threads

StoreChunk = Callable[[tirx.Buffer, Expr, tirx.Buffer], None]
"""Stores a chunk of a tensor from registers, at the offset of its first element in memory."""

_ORDERS = ((0, 1, 2, 3), (0, 2, 1, 3))
"""Axis orders of an epilogue's output for heads [batch, rows, H, D]: unchanged, or heads first."""


class FusedEpilogues(EpilogueFactory):
    """Creates epilogues at the position of the IRBuilder."""

    def __init__(self, func: tirx.PrimFunc, epilogues: Sequence[FusedEpilogue], tiles: ThreadTiles) -> None:
        self.func, self.epilogues, self.tiles = func, epilogues, tiles

    def create_epilogue(self, matmuls: Matmuls) -> Epilogue:
        """Return the epilogue of the matmuls.

        Raises:
            ValueError: The epilogue does not consist of pairs that are D / 2 apart, or there are several results.
        """
        outputs = matmuls.group.outputs
        epilogue = next((epilogue for epilogue in self.epilogues if epilogue.rows in outputs), None)
        if epilogue is None:
            return Epilogue(matmuls)
        if len(outputs) > 1 or len(matmuls.group.matmuls) > 1 or matmuls.batch_axes:
            raise ValueError("An epilogue must have one result of one matmul.")
        if epilogue.update is not None and row_size(epilogue.update.record) is None:
            raise ValueError("Rows of the cache are not multiples of a chunk.")
        store_result = self.make_store(epilogue)
        return (
            PairedEpilogue(matmuls, epilogue, store_result)
            if epilogue.stages
            else UpdatingEpilogue(matmuls, store_result)
        )

    def launch_trailing(self) -> None:
        """Launch one kernel for all epilogues, which read the stored results."""
        memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, self.func.params)}
        stages = [epilogue.stages or [_copy_stage(epilogue.rows)] for epilogue in self.epilogues]
        chunks = [Chunks(self.func, own_stages, own_stages[-1:], memory) for own_stages in stages]
        count = sum((group.count for group in chunks[1:]), chunks[0].count)
        stores = [self.make_store(epilogue) for epilogue in self.epilogues]

        def emit(n: int, number: Expr) -> None:
            """Emit the code of the chunk with that number, after those of the first n epilogues."""

            def emit_own() -> None:
                chunks[n].emit(number, lambda stage, at, chunk: stores[n](stage.output, at, chunk))

            if n == len(chunks) - 1:
                emit_own()
                return
            with T.If(number < chunks[n].count):
                with T.Then():
                    emit_own()
                with T.Else():
                    emit(n + 1, let(number - chunks[n].count))

        with launch_threads(count, self.tiles) as number:
            emit(0, number)

    def make_store(self, epilogue: FusedEpilogue) -> StoreChunk:
        """Return the function that stores chunks of an epilogue's output."""
        if epilogue.update is not None:
            cache = CacheRows(epilogue.update.bound())
            return lambda _, at, chunk: cache.store_chunk(at, chunk)
        memory = flat_view(epilogue.stages[-1].output)
        return lambda _, at, chunk: store_values(memory, at, chunk)


class UpdatingEpilogue(Epilogue):
    """Stores results, and writes them to the cache."""

    def __init__(self, matmuls: Matmuls, store_result: StoreChunk) -> None:
        super().__init__(matmuls)
        self.store_result = store_result

    def store_chunk(self, output: tirx.Buffer, at: Expr, chunk: tirx.Buffer) -> None:
        super().store_chunk(output, at, chunk)
        self.store_result(output, at, chunk)


class PairedEpilogue(Epilogue):
    """The epilogue of columns that are half a head apart: stores both, and the epilogue's output."""

    def __init__(self, matmuls: Matmuls, epilogue: FusedEpilogue, store_result: StoreChunk) -> None:
        self.matmuls, self.epilogue, self.store_result = matmuls, epilogue, store_result
        *_, H, D = epilogue.stages[0].output.shape
        if not isinstance(D, tirx.IntImm) or D.value % (2 * CHUNK):
            raise ValueError("Halves of heads are not multiples of a chunk.")
        self.memory = {buffer: flat_view(buffer) for buffer in filter(tirx.is_buffer_var, matmuls.func.params)}
        self.head_dim, self.apart, self.facts = D.value, D.value // 2, matmuls.facts.copy()
        self.h, self.i = tirx.Var("h", "int64"), tirx.Var("i", "int64")
        half = tirx.const(self.apart, "int64")
        self.facts.bind(self.h, 0, H)
        self.facts.bind(self.i, 0, half)
        self.row = ChunkedRow(self.facts, self.i, half)
        self.accumulators = [tirx.Var(name, matmuls.group.acc) for name in ("low", "high")]
        outputs, points = self.find_program()
        self.outputs = outputs
        self.offsets = [self.facts.simplify(flatten_index(x.shape, point)) for x, point in zip(outputs, points)]
        if self.row.width(self.offsets) != CHUNK:
            raise ValueError("Chunks of the result are not contiguous.")
        self.width = 2 * HALF_COLUMNS

    def find_program(self) -> tuple[list[tirx.Buffer], list[list[Expr]]]:
        """Return the stored outputs and their points: element i of head h, and the one half a head after it."""
        epilogue, accumulator = self.epilogue, self.matmuls.group.matmuls[0].stage
        *rows, _ = [substitute(index, self.matmuls.point) for index in accumulator.indices]
        dims = [self.i, self.i + self.apart]
        columns = self.simplify_points([[*rows, self.h * self.head_dim + d] for d in dims])
        stages = [stage for stage in (*self.matmuls.stages, *epilogue.stages) if not stage.reduce]
        evaluator, fused_output = Evaluator.of(stages, self.memory), epilogue.stages[-1].output
        shape = epilogue.stages[0].output.shape
        for order in _ORDERS:
            is_same_rank = len(fused_output.shape) == len(shape) == len(order)
            if not is_same_rank or not all(
                prim.expr_deep_equal(fused_output.shape[n], shape[k]) for n, k in enumerate(order)
            ):
                continue
            points = self.simplify_points([[[*rows, self.h, d][k] for k in order] for d in dims])
            outputs, points = [epilogue.rows, epilogue.rows, fused_output, fused_output], [*columns, *points]
            loads = [tirx.BufferLoad(*access) for access in zip(outputs, points)]
            stored = [output.dtype for output in outputs]
            try:
                bindings = {accumulator.output: list(zip(columns, self.accumulators))}
                self.program = evaluator.program(loads, self.facts, bindings, stored, rounds=False)
            except KeyError:  # an accumulator outside of the pair
                continue
            return outputs, points
        raise ValueError("An element of a head is computed from other elements than the pair half a head apart.")

    def simplify_points(self, points: list[list[Expr]]) -> list[list[Expr]]:
        return [[self.facts.simplify(index) for index in point] for point in points]

    def first(self, number: Expr) -> Expr:
        per_head = self.apart // HALF_COLUMNS
        return number // per_head * self.head_dim + number % per_head * HALF_COLUMNS

    def store_columns(
        self, batch_indices: Mapping[tirx.Var, Expr], row: Expr, column: Expr, accumulators: Sequence[Accumulator]
    ) -> None:
        """Store both halves, the first of which begins at `column`.

        `accumulators` has one accessor, in which the second half follows the first.
        """
        first = let((column % self.head_dim).astype("int64"))
        head = let((column // self.head_dim).astype("int64"))
        bindings = {**batch_indices, self.matmuls.m: let(row.astype("int64")), self.h: head}
        results = alloc_result_registers(self.program, len(self.outputs), CHUNK)

        def store_results(x: Expr, values: list[Expr]) -> None:
            for register, result in zip(results, values):
                store_element(register, x, result)

        (own,) = accumulators
        elements = {self.accumulators[0]: own, self.accumulators[1]: lambda x: own(x + HALF_COLUMNS)}
        evaluate_chunk(self.row, self.program, CHUNK, bindings, first, store_results, elements)
        for output, address, register in zip(self.outputs, self.offsets, results):
            at = let(substitute(address, {**bindings, self.i: first}))
            if output is self.epilogue.rows:
                self.store_chunk(output, at, register)
            else:
                self.store_result(output, at, register)


def _copy_stage(rows: tirx.Buffer) -> Stage:
    """Return a stage whose output copies the rows."""
    axes = tuple(Axis(tirx.Var(f"v{n}", "int64"), extent) for n, extent in enumerate(rows.shape))
    indices = [axis.var for axis in axes]
    return Stage(tirx.decl_buffer(rows.shape, rows.dtype, "itself"), axes, (), None, tirx.BufferLoad(rows, indices))
