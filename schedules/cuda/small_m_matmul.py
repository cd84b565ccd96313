"""Small-M matmuls, which take as long as B takes to be read: decoding.

B lies in rows of k, one for each column of C, and is what mma.sync calls A: 16 of its rows by 16 values of k, times 8
rows of x, the other operand. k is summed in whatever order, so that a thread asks for 16 bytes at a time: of row g of B
it has k = 8 t to 8 t + 7 of each piece of 32, which are the operands of two matmuls. In float32 these numbers are half
as large. A thread copies its own chunks of both to shared memory, several pieces ahead, and nobody else looks at them.
Of a matrix of codes 16 bytes are c = 2 or 4 times as many k, which are expanded in registers.

    for each 16 columns of C, a block                              warps share k: pieces of 32 c, `ahead` / c at once
        sums [16, rows] += B [16, 32 c] x [rows, 32 c]^T           2 c matmuls for each 8 rows
        the sums of the warps meet in shared memory -> epilogue.py

Rows of x may be computed by the block itself, in front, while its first columns of B are on their way
(prologue_rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TypeAlias

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.stages import unravel
from . import ptx
from .device import Device
from .epilogue import HALF, Ends, Epilogue, row_of
from .host import on_host
from .matmul_grid import Place
from .matmul_reader import Matmuls, Operand, Order, chunks_at_once
from .pieces import Pieces, Ring
from .prologue_rows import ProloguePieces, PrologueRows
from .ptx import WARP, let, put, registers, unrolled
from .shared_tile import CHUNK
from .small_m_tiles import SmallMTiles

COLUMNS, PIECE = 2 * HALF, 4  # rows of B, and chunks of k that a warp has of each
PITCH = COLUMNS + 4  # floats of a row of sums in shared memory: threads of a fragment meet each bank once

Group: TypeAlias = tuple[Matmuls, Operand, list[Operand]]
"""Matmuls whose sums are read together, with A and their Bs."""


def takes(groups: Sequence[Group]) -> bool:
    """Whether all operands lie in chunks along k, for all sizes, and as many k of each B in whole 16 bytes."""
    operands = [operand for _, a, bs in groups for operand in (a, *bs)]
    along_k = all(operand.order is Order.K and operand.condition is None for operand in operands)
    bs = [b for _, _, bs in groups for b in bs]
    pieces = {chunks_at_once(b.codes) for b in bs}
    whole = all(b.codes is None or b.codes.depth % (chunks_at_once(b.codes) * CHUNK) == 0 for b in bs)
    return along_k and len(pieces) == 1 and whole


def small_m_matmul(
    groups: Sequence[Group], tiles: SmallMTiles, device: Device, ends: Ends, normed: PrologueRows | None = None
) -> None:
    """Emits the kernel and its launch, for at most `tiles.rows` rows, into the function that is open. Several groups
    multiply the same A, one matmul each: blocks for one are behind those for the others. A may be made of `normed`, by
    every block for itself; the first one stores it, too."""
    rows = on_host(groups[0][0].rows)
    shared = max(tiles.shared_memory(matmuls.shape) for matmuls, *_ in groups)
    sizes = [on_host(tirx.ceildiv(matmuls.columns, COLUMNS)) for matmuls, *_ in groups]
    counts = [on_host(size * matmuls.batch) for size, (matmuls, *_) in zip(sizes, groups)]
    columns = [on_host(matmuls.columns) for matmuls, *_ in groups]
    epilogues = [ends.epilogue(matmuls) for matmuls, *_ in groups]
    blocks = on_host(sum(counts[1:], counts[0]))
    with (
        T.If(blocks * rows > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
    ):
        front = 0 if normed is None else normed.shared_memory
        ring = Ring(thread, tiles.threads, front + shared, front)

        def emit(n: int, first: Expr) -> None:
            """The code of blocks for group n and those behind it, which begin at `first`."""
            own, last = let(block - first), n == len(groups) - 1
            with nullcontext() if last else T.If(own < counts[n].astype("int32")):
                with nullcontext() if last else T.Then():
                    size = sizes[n].astype("int32")
                    axes = groups[n][0].batch_axes
                    numbers = unravel(let(own // size).astype("int64"), axes)
                    n0 = let(epilogues[n].first(own % size))
                    place = Place(T.int32(0), n0, {axis.var: let(i) for axis, i in zip(axes, numbers)})
                    ring.taken = 0
                    of_a = None if normed is None else (normed, tirx.EQ(block, 0) if n == 0 else None)
                    Columns(groups[n], tiles, epilogues[n], place, ring, device.begins_early, of_a).emit(
                        rows, columns[n]
                    )
                if not last:
                    with T.Else():
                        emit(n + 1, let(first + counts[n].astype("int32")))

        emit(0, T.int32(0))


class Columns:
    """The code of one block: 16 columns of each matmul, rows from that of its place on."""

    def __init__(
        self,
        group: Group,
        tiles: SmallMTiles,
        epilogue: Epilogue,
        place: Place,
        ring: Ring,
        waits: bool,
        normed: tuple[PrologueRows, Expr | None] | None,
    ) -> None:
        """waits: whether earlier kernels may still run. normed: what A is made of, and whether it is stored by this
        block, which may be out of the question."""
        self.waits, self.normed = waits, normed
        self.matmuls, self.a, self.bs = group
        matmuls = self.matmuls
        self.tiles, self.epilogue, self.ring, self.thread = tiles, epilogue, ring, ring.thread
        self.m0, self.n0, self.where = place.m0, place.n0, place.where
        self.lane, self.warp = let(self.thread % WARP), let(self.thread // WARP)
        self.g, self.t = let(self.lane // 4), let(self.lane % 4)
        self.type, self.blocks = matmuls.shape.type, tiles.rows // 8
        self.sums = [registers(self.blocks * 4, "float32") for _ in self.bs]

    def emit(self, rows: Expr, columns: Expr) -> None:
        """rows: how many there are from the first one on."""
        rows, columns = let(rows.astype("int32")), let(columns.astype("int32"))
        is_selected = self.matmuls.is_selected
        if is_selected and self.waits:  # an earlier kernel has written which matrices these are
            ptx.wait_for_earlier_kernels()
        depth = let(self.matmuls.depth.astype("int32"))
        c = chunks_at_once(self.bs[0].codes)
        ahead = self.tiles.pieces(c)

        def pieces_of(operand: Operand, outer: Expr, extent: Expr) -> Pieces:
            place = (outer, outer < extent)
            return Pieces(operand, self.type, self.epilogue.memory, self.where, place, self.ring, ahead, c)

        end = let(self.m0 + rows)
        ours = [[pieces_of(b, self.n0 + self.g + r * self.epilogue.apart, columns) for r in range(2)] for b in self.bs]
        theirs: Sequence[Pieces | ProloguePieces] = (
            [pieces_of(self.a, self.m0 + self.g + r * 8, end) for r in range(self.blocks)]
            if self.normed is None
            else [ProloguePieces(self.normed[0], self.ring, (self.g, self.g < rows), c)]
        )
        every = [*(pieces for pair in ours for pieces in pair), *theirs]
        for sums in self.sums:
            with unrolled(self.blocks * 4) as n:
                put(sums, n, T.float32(0))
        each = c * PIECE * self.type.chunk  # values of k of a piece
        stride = self.tiles.warps * ahead * each

        def place(turn: Expr | int, piece: int) -> tuple[Expr, Expr]:
            """The first k of the thread's chunks, and whether they exist."""
            k = let(turn * stride + (self.warp * ahead + piece) * each + self.t * (each // PIECE))
            return k, k < depth

        def fetch(turn: Expr | int, piece: int, some: Sequence[Pieces | ProloguePieces]) -> None:
            at = place(turn, piece)
            for pieces in some:
                pieces.fetch(piece, *at)

        # What no kernel writes need not wait for any.
        early = not is_selected and all(map(self.matmuls.is_weight, self.bs))
        if early:
            for piece in range(ahead):
                fetch(0, piece, every[: -self.blocks])
        if self.waits and not is_selected:
            ptx.wait_for_earlier_kernels()
        if self.normed is not None:
            self.make(*self.normed, rows)
        for piece in range(ahead):
            fetch(0, piece, theirs if early else every)
            ptx.commit_copies()
        with T.serial((depth + stride - 1) // stride) as turn:
            for piece in range(ahead):
                ptx.wait_for_copies(ahead - 1)
                at = place(turn, piece)
                for pieces in every:
                    pieces.read(piece, *at)
                for n in range(c):
                    self.multiply([pieces.chunk(piece, n) for pieces in theirs],
                                  [[pieces.chunk(piece, n) for pieces in pair] for pair in ours])  # fmt: skip
                fetch(turn + 1, piece, every)
                ptx.commit_copies()
        self.finish(rows, columns)

    def make(self, normed: PrologueRows, stores: Expr | None, rows: Expr) -> None:
        """A, in shared memory."""
        normed.emit(rows, self.tiles.warps, self.epilogue.memory, (self.ring.memory, self.thread), stores)

    def multiply(self, x: list[list[list[Expr]]], ours: list[list[list[list[Expr]]]]) -> None:
        """sums += a chunk of the rows of B by one of those of x."""
        for sums, (low, high) in zip(self.sums, ours):
            for half in (0, 2):
                b = [[words[half + n] for n in range(2) for words in both] for both in zip(low, high)]
                for r in range(self.blocks):
                    into = [sums[r * 4 + y] for y in range(4)]
                    self.type.multiply_add(into, b, [part[half : half + 2] for part in x[r]])

    def finish(self, rows: Expr, columns: Expr) -> None:
        """What the warps summed up, added and stored: rows of the sums are columns of C."""
        count, most = len(self.bs), self.tiles.rows
        size = count * most * PITCH  # of a warp
        # In the place of what has been read; the last copies, of nothing, may be on their way there.
        ptx.wait_for_copies(0)
        ptx.synchronize()
        memory = T.decl_buffer((self.tiles.warps * size,), "float32", data=self.ring.memory.data, scope="shared.dyn")
        for p, sums in enumerate(self.sums):
            for r in range(self.blocks):
                for y in range(4):
                    row, column = self.t * 2 + y % 2 + r * 8, self.g + y // 2 * HALF
                    at = self.warp * size + (p * most + row) * PITCH + column
                    put(memory, at, sums[r * 4 + y])
        ptx.synchronize()
        width = self.epilogue.width
        across, threads = COLUMNS // width, self.tiles.warps * WARP
        with T.serial(-(-most * across // threads)) as turn:
            chunk = let(turn * threads + self.thread)
            row, c = let(chunk // across), let(chunk % across * width)
            with T.If(tirx.all(row < rows, row < most, self.n0 + c < columns)), T.Then():
                total = registers(count * width, "float32")
                with unrolled(count * width) as n:
                    put(total, n, T.float32(0))
                with T.serial(self.tiles.warps) as warp:
                    for p in range(count):
                        at = let(warp * size + (p * most + row) * PITCH + c)
                        with unrolled(width) as x:
                            put(total, p * width + x, total[p * width + x] + memory[at + x])
                found = [row_of(total, p * width) for p in range(count)]
                self.epilogue.store(self.where, self.m0 + row, let(self.n0 + c), found)
