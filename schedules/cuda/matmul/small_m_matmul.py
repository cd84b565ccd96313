"""Small-M matmuls (GEMV and skinny GEMM), whose time is that of reading B: decoding.

B has rows of k, one for each column of C, and is operand A of mma.sync: 16 of its rows by 16 values of k, times 8 rows
of x, the other operand. The order of accumulation along k is free, so a thread loads 16 bytes at a time: of row g of B
it has k = 8 t to 8 t + 7 of each k-slice of 32, which are the operands of two matmuls. In float32 these numbers are
half as large. A thread copies its own chunks of both to shared memory, several k-slices ahead, and no other thread
reads them. In a quantized matrix 16 bytes are c = 2 or 4 times as many k, which are dequantized in registers.

    for each 16 columns of C, a block                         warps share k: k-slices of 32 c, `ahead` / c at once
        accumulators [16, rows] += B [16, 32 c] x [rows, 32 c]^T        2 c matmuls for each 8 rows
        the accumulators of the warps are added in shared memory -> epilogue.py

Rows of x may be computed by the block itself in a prologue, while its first columns of B are in flight
(prologue_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.stages import unravel
from ..fusion.prologue_rows import PrologueRows, PrologueSlices
from ..primitives import ptx
from ..primitives.device import Device
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, alloc_registers, let, store_element, unrolled
from ..primitives.shared_tile import CHUNK
from .epilogue import HALF_COLUMNS, Epilogue, EpilogueFactory, index_accumulators
from .k_slices import KSlices, ThreadSlots
from .matmul_grid import TilePosition
from .matmul_reader import Matmuls, Operand, Order, chunks_per_load
from .small_m_tiles import SmallMTiles

COLUMNS, SLICE_CHUNKS = 2 * HALF_COLUMNS, 4  # rows of B, and chunks of k per warp in a k-slice of each
PITCH = COLUMNS + 4  # floats of a row of accumulators in shared memory: threads of a fragment access each bank once

MatmulOperands: TypeAlias = tuple[Matmuls, Operand, list[Operand]]
"""Matmuls with a common epilogue, with A and their Bs."""


def can_multiply_small_m(groups: Sequence[MatmulOperands]) -> bool:
    """Return whether all operands have chunks along k for all sizes, and all Bs have as many k in 16 bytes."""
    operands = [operand for _, a, bs in groups for operand in (a, *bs)]
    along_k = all(operand.order is Order.K and operand.condition is None for operand in operands)
    bs = [b for _, _, bs in groups for b in bs]
    chunk_counts = {chunks_per_load(b.quantized) for b in bs}
    has_whole_loads = all(
        b.quantized is None or b.quantized.depth % (chunks_per_load(b.quantized) * CHUNK) == 0 for b in bs
    )
    return along_k and len(chunk_counts) == 1 and has_whole_loads


def small_m_matmul(
    groups: Sequence[MatmulOperands],
    tiles: SmallMTiles,
    device: Device,
    factory: EpilogueFactory,
    prologue: PrologueRows | None = None,
) -> None:
    """Emit the kernel and its launch, for at most `tiles.rows` rows, into the function being built.

    Several groups multiply the same A, one matmul each: blocks for one follow those for the others. A may be computed
    by `prologue`, by every block for itself; the first block stores it, too.
    """
    rows = bind_on_host(groups[0][0].rows)
    shared_bytes = max(tiles.shared_memory(matmuls.shape) for matmuls, *_ in groups)
    sizes = [bind_on_host(tirx.ceildiv(matmuls.columns, COLUMNS)) for matmuls, *_ in groups]
    counts = [bind_on_host(size * matmuls.batch) for size, (matmuls, *_) in zip(sizes, groups)]
    columns = [bind_on_host(matmuls.columns) for matmuls, *_ in groups]
    epilogues = [factory.create_epilogue(matmuls) for matmuls, *_ in groups]
    blocks = bind_on_host(sum(counts[1:], counts[0]))
    with (
        T.If(blocks * rows > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
    ):
        front = 0 if prologue is None else prologue.row_memory_bytes
        slots = ThreadSlots(thread, tiles.threads, front + shared_bytes, front)

        def emit(n: int, first: Expr) -> None:
            """Emit the code of blocks for group n and the following ones, which begin at `first`."""
            own, last = let(block - first), n == len(groups) - 1
            with nullcontext() if last else T.If(own < counts[n].astype("int32")):
                with nullcontext() if last else T.Then():
                    size = sizes[n].astype("int32")
                    axes = groups[n][0].batch_axes
                    numbers = unravel(let(own // size).astype("int64"), axes)
                    n0 = let(epilogues[n].first(own % size))
                    position = TilePosition(T.int32(0), n0, {axis.var: let(i) for axis, i in zip(axes, numbers)})
                    slots.allocated = 0
                    a_source = None if prologue is None else (prologue, tirx.EQ(block, 0) if n == 0 else None)
                    SmallMBlock(groups[n], tiles, epilogues[n], position, slots, device.begins_early, a_source).emit(
                        rows, columns[n]
                    )
                if not last:
                    with T.Else():
                        emit(n + 1, let(first + counts[n].astype("int32")))

        emit(0, T.int32(0))


class SmallMBlock:
    """The code of one block: 16 columns of each matmul, rows from that of its position on."""

    def __init__(
        self,
        group: MatmulOperands,
        tiles: SmallMTiles,
        epilogue: Epilogue,
        position: TilePosition,
        slots: ThreadSlots,
        waits: bool,
        prologue: tuple[PrologueRows, Expr | None] | None,
    ) -> None:
        """`waits` tells whether earlier kernels may still run.

        `prologue` is the prologue that computes A, and whether this block stores A; None where no block of its group
        does.
        """
        self.waits, self.prologue = waits, prologue
        self.matmuls, self.a, self.bs = group
        matmuls = self.matmuls
        self.tiles, self.epilogue, self.slots, self.thread = tiles, epilogue, slots, slots.thread
        self.m0, self.n0, self.batch_indices = position.m0, position.n0, position.batch_indices
        self.lane, self.warp = let(self.thread % WARP), let(self.thread // WARP)
        self.g, self.t = let(self.lane // 4), let(self.lane % 4)
        self.type, self.blocks = matmuls.shape.type, tiles.rows // 8
        self.accumulators = [alloc_registers(self.blocks * 4, "float32") for _ in self.bs]

    def emit(self, rows: Expr, columns: Expr) -> None:
        """Emit the block for `rows` rows from the first one on."""
        rows, columns = let(rows.astype("int32")), let(columns.astype("int32"))
        is_selected = self.matmuls.is_selected
        if is_selected and self.waits:  # an earlier kernel wrote the indices of the matrices
            ptx.wait_for_earlier_kernels()
        depth = let(self.matmuls.depth.astype("int32"))
        c = chunks_per_load(self.bs[0].quantized)
        ahead = self.tiles.slices(c)
        b_slices, a_slices = self.make_slices(rows, columns, c)
        all_slices = [*(slices for pair in b_slices for slices in pair), *a_slices]
        for accumulators in self.accumulators:
            with unrolled(self.blocks * 4) as n:
                store_element(accumulators, n, T.float32(0))
        slice_depth = c * SLICE_CHUNKS * self.type.chunk  # values of k of a k-slice
        stride = self.tiles.warps * ahead * slice_depth

        def locate_chunks(iteration: Expr | int, index: int) -> tuple[Expr, Expr]:
            """Return the first k of the thread's chunks, and whether they exist."""
            k = let(
                iteration * stride + (self.warp * ahead + index) * slice_depth + self.t * (slice_depth // SLICE_CHUNKS)
            )
            return k, k < depth

        def fetch(iteration: Expr | int, index: int, operands: Sequence[KSlices | PrologueSlices]) -> None:
            at = locate_chunks(iteration, index)
            for slices in operands:
                slices.fetch(index, *at)

        # Operands that no kernel writes need not wait for any.
        can_fetch_early = not is_selected and all(map(self.matmuls.is_weight, self.bs))
        if can_fetch_early:
            for index in range(ahead):
                fetch(0, index, all_slices[: -self.blocks])
        if self.waits and not is_selected:
            ptx.wait_for_earlier_kernels()
        if self.prologue is not None:
            self.emit_prologue(*self.prologue, rows)
        for index in range(ahead):
            fetch(0, index, a_slices if can_fetch_early else all_slices)
            ptx.commit_copies()
        with T.serial((depth + stride - 1) // stride) as iteration:
            for index in range(ahead):
                ptx.wait_for_copies(ahead - 1)
                at = locate_chunks(iteration, index)
                for slices in all_slices:
                    slices.read(index, *at)
                for n in range(c):
                    self.multiply([slices.chunk(index, n) for slices in a_slices],
                                  [[slices.chunk(index, n) for slices in pair] for pair in b_slices])  # fmt: skip
                fetch(iteration + 1, index, all_slices)
                ptx.commit_copies()
        self.finish(rows, columns)

    def make_slices(
        self, rows: Expr, columns: Expr, c: int
    ) -> tuple[list[list[KSlices]], Sequence[KSlices | PrologueSlices]]:
        """Return the k-slices of the thread's rows of each B, and those of A, c chunks each."""
        ahead = self.tiles.slices(c)

        def make_row(operand: Operand, outer: Expr, extent: Expr) -> KSlices:
            position = (outer, outer < extent)
            return KSlices(operand, self.type, self.epilogue.memory, self.batch_indices, position, self.slots, ahead, c)

        end = let(self.m0 + rows)
        b_slices = [
            [make_row(b, self.n0 + self.g + r * self.epilogue.apart, columns) for r in range(2)] for b in self.bs
        ]
        a_slices: Sequence[KSlices | PrologueSlices] = (
            [make_row(self.a, self.m0 + self.g + r * 8, end) for r in range(self.blocks)]
            if self.prologue is None
            else [PrologueSlices(self.prologue[0], self.slots, (self.g, self.g < rows), c)]
        )
        return b_slices, a_slices

    def emit_prologue(self, prologue: PrologueRows, stores_a: Expr | None, rows: Expr) -> None:
        """Compute A, in shared memory."""
        prologue.emit(rows, self.tiles.warps, self.epilogue.memory, (self.slots.memory, self.thread), stores_a)

    def multiply(self, x: list[list[list[Expr]]], b_chunks: list[list[list[list[Expr]]]]) -> None:
        """Emit accumulators += a chunk of the rows of B times one of those of x."""
        for accumulators, (low, high) in zip(self.accumulators, b_chunks):
            for half in (0, 2):
                b = [[registers[half + n] for n in range(2) for registers in rows] for rows in zip(low, high)]
                for r in range(self.blocks):
                    accumulator = [accumulators[r * 4 + y] for y in range(4)]
                    self.type.multiply_add(accumulator, b, [operand[half : half + 2] for operand in x[r]])

    def finish(self, rows: Expr, columns: Expr) -> None:
        """Add the accumulators of the warps and store them: rows of the accumulators are columns of C."""
        count, max_rows = len(self.bs), self.tiles.rows
        size = count * max_rows * PITCH  # of a warp
        # They reuse the memory of the operands; the last copies, which are empty, may be in flight there.
        ptx.wait_for_copies(0)
        ptx.synchronize()
        memory = T.decl_buffer((self.tiles.warps * size,), "float32", data=self.slots.memory.data, scope="shared.dyn")
        for p, accumulators in enumerate(self.accumulators):
            for r in range(self.blocks):
                for y in range(4):
                    row, column = self.t * 2 + y % 2 + r * 8, self.g + y // 2 * HALF_COLUMNS
                    at = self.warp * size + (p * max_rows + row) * PITCH + column
                    store_element(memory, at, accumulators[r * 4 + y])
        ptx.synchronize()
        width = self.epilogue.width
        across, threads = COLUMNS // width, self.tiles.warps * WARP
        with T.serial(-(-max_rows * across // threads)) as iteration:
            chunk = let(iteration * threads + self.thread)
            row, c = let(chunk // across), let(chunk % across * width)
            with T.If(tirx.all(row < rows, row < max_rows, self.n0 + c < columns)), T.Then():
                total = alloc_registers(count * width, "float32")
                with unrolled(count * width) as n:
                    store_element(total, n, T.float32(0))
                with T.serial(self.tiles.warps) as warp:
                    for p in range(count):
                        at = let(warp * size + (p * max_rows + row) * PITCH + c)
                        with unrolled(width) as x:
                            store_element(total, p * width + x, total[p * width + x] + memory[at + x])
                totals = [index_accumulators(total, p * width) for p in range(count)]
                self.epilogue.store_columns(self.batch_indices, self.m0 + row, let(self.n0 + c), totals)
