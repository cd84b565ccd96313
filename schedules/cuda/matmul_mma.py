"""Matmuls of matrices by mma.sync: tiles of A and B come through shared memory by asynchronous copies.

    for each tile of m x n of C, and each part of k, a block                      warps_m x warps_n warps
        for each step of k values                                                 a ring of `stages`
            A [m, k], B [n, k] -> shared memory, stages - 1 steps ahead           codes by way of registers, expanded
            C += A B^T                                                            in registers, 64 x 64 of a warp,
                                                                                  float32 as tensor_types.py says
        C -> bias, activation, residual -> output                                 epilogue.py
        where k is in parts: C -> the device's memory, and a second launch sums them

Blocks that follow each other work on `swizzle` tiles of rows, so that what they read stays in the second-level cache.
Rows, columns and k behind the last are zeros in shared memory, and not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from . import ptx
from .epilogue import Epilogue
from .expansion import Expansion
from .host import sm_count
from .matmul_grid import Grid
from .matmul_reader import Matmuls, Operand, Order
from .matmul_sums import Fragment, Sums
from .matmul_tiles import MatmulTiles
from .ptx import WARP, let, put, registers, shared_memory, unrolled
from .shared_tile import SharedTile


def matmul_mma(matmuls: Matmuls, a: Operand, bs: list[Operand], tiles: MatmulTiles) -> None:
    """Emits the kernel and its launches into the function that is open."""
    epilogue, grid = Epilogue(matmuls), Grid(matmuls, tiles)
    with T.If(grid.blocks > 0), T.Then():
        grid.split(sm_count())
        sums = Sums(grid, epilogue)
        conditions = [operand.condition for operand in (a, *bs) if operand.condition is not None]

        def launch(chunks: bool) -> None:
            with (
                T.launch_thread("blockIdx.x", grid.blocks.astype("int32")) as block,
                T.launch_thread("blockIdx.y", grid.parts.astype("int32")) as part,
                T.launch_thread("threadIdx.x", tiles.threads) as thread,
            ):
                _Tile(grid, tiles, sums, (a, bs), (block, part, thread), chunks).emit()

        if conditions:
            with T.If(tirx.all(*conditions)):
                with T.Then():
                    launch(True)
                with T.Else():
                    launch(False)
        else:
            launch(True)
        with T.If(grid.shares > 0), T.Then():
            sums.add_parts()


class _Tile:
    """The code of one block."""

    def __init__(
        self,
        grid: Grid,
        tiles: MatmulTiles,
        sums: Sums,
        operands: tuple[Operand, list[Operand]],
        place: tuple[Expr, Expr, Expr],
        chunks: bool,
    ) -> None:
        self.grid, self.tiles, self.sums = grid, tiles, sums
        block, part, self.thread = place
        self.piece = grid.part(block, part)
        self.place = self.piece.place
        shape = grid.matmuls.shape
        self.type, (a, bs) = shape.type, operands
        self.warp_n = grid.each // tiles.warps_n  # columns of a matmul that a warp has
        elements = tiles.shared_memory(shape) // self.type.bytes
        self.memory = shared_memory(elements, self.type.element, 128)
        self.stage = (tiles.m + tiles.n) * tiles.k
        outer = (tiles.m, self.place.m0, grid.rows.astype("int32"))
        self.loaders = [_Loader(self, a, 0, outer, chunks)]
        outer = (grid.each, self.place.n0, grid.columns.astype("int32"))
        for n, b in enumerate(bs):
            loader = _Loader if b.codes is None else _Expander
            self.loaders.append(loader(self, b, (tiles.m + n * grid.each) * tiles.k, outer, chunks))
        self.lane, self.warp = let(self.thread % WARP), let(self.thread // WARP)
        self.warp_row = let(self.warp // tiles.warps_n * tiles.warp_m)
        self.warp_column = let(self.warp % tiles.warps_n * self.warp_n)
        self.m_blocks, self.n_blocks = tiles.warp_m // 16, self.warp_n // 8
        self.C = [registers(self.m_blocks * self.n_blocks * 4, "float32") for _ in bs]
        self.a_words = registers(self.m_blocks * 4 * self.type.parts, "uint32")
        self.b_words = registers(4 * self.type.parts, "uint32")

    def emit(self) -> None:
        tiles = self.tiles
        first, last = self.piece.first, self.piece.last
        for C in self.C:
            with unrolled(int(C.shape[0])) as n:
                put(C, n, T.float32(0))
        for s in range(tiles.stages - 1):
            self.load(first + s, tirx.const(s, "int32"), last)
            self.expand(first + s, tirx.const(s, "int32"), last)
        with T.serial(last - first) as n:
            ptx.wait_for_copies(tiles.stages - 2)
            ptx.synchronize()
            step, slot = first + n + (tiles.stages - 1), (n + (tiles.stages - 1)) % tiles.stages
            self.load(step, slot, last)
            self.multiply(n % tiles.stages)
            self.expand(step, slot, last)
        ptx.synchronize()  # sums take the place of the stages, into which no copy is on its way any more
        self.store()

    def load(self, step: Expr, slot: Expr, last: Expr) -> None:
        with T.If(step < last), T.Then():
            for loader in self.loaders:
                loader.copy(let(slot * self.stage), let(step * self.tiles.k))
        ptx.commit_copies()

    def expand(self, step: Expr, slot: Expr, last: Expr) -> None:
        """The codes that `load` asked for, after what is done meanwhile."""
        expanders = [loader for loader in self.loaders if isinstance(loader, _Expander)]
        if expanders:
            with T.If(step < last), T.Then():
                for expander in expanders:
                    expander.expand(let(slot * self.stage))

    def multiply(self, slot: Expr) -> None:
        """C += A B^T of a stage."""
        at, parts = let(slot * self.stage), range(self.type.parts)
        a, *bs = self.loaders
        read_a = a.reader(at, self.warp_row, first=True)
        readers = [b.reader(at, self.warp_column, first=False) for b in bs]
        of_a = self.m_blocks * 4
        with unrolled(self.tiles.k // self.type.depth) as k:
            with unrolled(self.m_blocks) as m:
                read_a([self.a_words[m * 4 + x] for x in range(4)], m, k)
            self.type.split(self.a_words, of_a)
            for C, read_b in zip(self.C, readers):
                with unrolled(self.n_blocks // 2) as pair:
                    read_b([self.b_words[x] for x in range(4)], pair, k)
                    self.type.split(self.b_words, 4)
                    with unrolled(self.m_blocks) as m:
                        for x in range(2):
                            c = [C[(m * self.n_blocks + pair * 2 + x) * 4 + y] for y in range(4)]
                            ours = [[self.a_words[part * of_a + m * 4 + y] for y in range(4)] for part in parts]
                            theirs = [[self.b_words[part * 4 + 2 * x + y] for y in range(2)] for part in parts]
                            self.type.multiply_add(c, ours, theirs)

    def store(self) -> None:
        size = self.tiles.shared_memory(self.grid.matmuls.shape) // 4
        memory = T.decl_buffer((size,), "float32", data=self.memory.data, scope="shared.dyn")
        mine = let(self.warp * (16 * self.sums.pitch(self.warp_n)))
        for m in range(self.m_blocks):

            def fragment(C: tirx.Buffer, m: int = m) -> Fragment:
                return lambda n, y: C[(m * self.n_blocks + n) * 4 + y]

            row0 = let(self.place.m0 + self.warp_row + m * 16)
            rows = (row0, let(self.place.n0 + self.warp_column), self.warp_n)
            self.sums.store(self.piece, rows, [fragment(C) for C in self.C], (memory, mine), self.lane)


class _Loader:
    """Tiles of an operand on their way to shared memory. Rows of a tile lie along the operand's chunks."""

    def __init__(self, tile: _Tile, operand: Operand, start: int, outer: tuple[int, Expr, Expr], chunks: bool) -> None:
        self.tile, self.operand, self.start = tile, operand, start
        self.whole = chunks and operand.order is not Order.NONE
        self.order = Order.OUTER if operand.order is Order.OUTER else Order.K
        size, self.first, self.extent = outer
        depth = tile.tiles.k
        self.rows, length = (size, depth) if self.order is Order.K else (depth, size)
        self.chunk_size = tile.type.chunk
        self.chunks = length // self.chunk_size
        thread = tile.thread
        self.row, self.chunk = let(thread // self.chunks), let(thread % self.chunks)
        self.at_once = tile.tiles.threads // self.chunks
        self.passes = self.rows // self.at_once
        self.memory = tile.sums.epilogue.memory[operand.buffer]
        self.starts = registers(self.passes if self.order is Order.K else 1, "int64")
        for n in range(int(self.starts.shape[0])):
            here = self.first + (self.row + n * self.at_once if self.order is Order.K else self.chunk * self.chunk_size)
            put(self.starts, n, self.start_of(here))

    def start_of(self, outer: Expr) -> Expr:
        return substitute(self.operand.start, {**self.tile.place.where, self.operand.outer: outer.astype("int64")})

    def along(self, k: Expr) -> Expr:
        return substitute(self.operand.along, {self.operand.k: k.astype("int64")})

    def shared(self, at: Expr) -> SharedTile:
        down = self.order is Order.OUTER and self.tile.type.bytes == 4
        return SharedTile(self.tile.memory, at + self.start, self.chunks, down)

    def copy(self, at: Expr, k0: Expr) -> None:
        """The tile from k0 on to the stage at `at`."""
        to, depth = self.shared(at), self.tile.grid.depth.astype("int32")
        with unrolled(self.passes) as n:
            row = self.row + n * self.at_once
            along = self.chunk * self.chunk_size
            outer, k = (row, along) if self.order is Order.K else (along, row)
            outer, k = let(self.first + outer), let(k0 + k)
            place = to.at(row, self.chunk)
            if self.whole:
                source = self.starts[n if self.order is Order.K else 0] + self.along(k)
                ptx.copy_chunk(place, self.memory[source], tirx.all(outer < self.extent, k < depth))
            else:
                self.copy_elements(place, outer, k, depth)

    def copy_elements(self, place: ptx.Element, outer: Expr, k: Expr, depth: Expr) -> None:
        """A chunk, element by element: whatever lies between them."""
        with unrolled(self.chunk_size) as x:
            o, kk = (outer, let(k + x)) if self.order is Order.K else (let(outer + x), k)
            there = tirx.all(o < self.extent, kk < depth)
            source = self.start_of(o) + self.along(kk)
            zero = tirx.const(0, self.tile.type.element)
            put(self.tile.memory, place.indices[0] + x, T.if_then_else(there, self.memory[source], zero))

    def reader(self, at: Expr, outer: Expr, first: bool) -> Callable[[Sequence[ptx.Element], Expr, Expr], None]:
        """(words, n, k): words := the operands of the n-th 16 rows (or columns) from `outer` on, and the k-th matmul.

        first: as operand A of mma.sync, whose matrices come in another order than those of B.
        """
        lane, tile = self.tile.lane, self.shared(at)
        low, high = lane % 8, lane // 8
        inner, k = (high % 2, high // 2) if first else (high // 2, high % 2)
        if self.order is Order.K:
            along_k = tile.reader(let(outer + inner * 8 + low), k)
            return lambda words, n, step: ptx.load_matrices(words, along_k(n * 16, step * 2))
        if not tile.down:
            across = tile.reader(let(k * 8 + low), let(outer // self.chunk_size + inner))
            return lambda words, n, step: ptx.load_matrices(words, across(step * 16, n * 2), transposed=True)
        each = tile.reader(lane % 4, let(outer // 4 + lane // 16))
        within = let(lane // 4 % 4)

        def one_by_one(words: Sequence[ptx.Element], n: Expr, step: Expr) -> None:
            for x, word in enumerate(words):
                row, column = (x // 2, x % 2) if first else (x % 2, x // 2)
                element = each(step * 8 + row * 4, n * 4 + column * 2)
                value = self.tile.memory[element.indices[0] + within]
                put(word.source, word.indices[0], T.reinterpret("uint32", value))

        return one_by_one


class _Expander(_Loader):
    """The same of codes, whose chunks a thread keeps until it has them expanded. Only columns that exist are stored,
    and behind the last k A is 0: what is there must be finite, no more."""

    def __init__(self, tile: _Tile, operand: Operand, start: int, outer: tuple[int, Expr, Expr], chunks: bool) -> None:
        super().__init__(tile, operand, start, outer, chunks)
        assert operand.codes is not None
        self.expansion = Expansion(operand.codes, tile.type.element, tile.sums.epilogue.memory)
        self.fetched = registers(self.passes * self.expansion.words, "uint32")
        self.scales = [registers(2, "float32") for _ in range(self.passes)]

    def copy(self, at: Expr, k0: Expr) -> None:
        """To registers."""
        k, words = let(k0 + self.chunk * self.chunk_size), self.expansion.words
        for n in range(self.passes):
            column = let(self.first + self.row + n * self.at_once)
            there = tirx.all(column < self.extent, k < self.tile.grid.depth.astype("int32"))
            for x in range(words):
                put(self.fetched, n * words + x, T.uint32(0))
            with T.If(there), T.Then():
                self.expansion.fetch(self.fetched, n * words, self.starts[n] + k.astype("int64"), 1)
            stored = let(column + substitute(self.operand.first, self.tile.place.where).astype("int32"))
            self.expansion.scale_and_zero(self.scales[n], stored, k, there)

    def expand(self, at: Expr) -> None:
        """To the stage at `at`."""
        to, words = self.shared(at), registers(4, "uint32")
        for n in range(self.passes):
            self.expansion.expand(words, 0, self.fetched, n * self.expansion.words, self.scales[n])
            place = to.at(self.row + n * self.at_once, self.chunk)
            ptx.store_chunk(place, words)
