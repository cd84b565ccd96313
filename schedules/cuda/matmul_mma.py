"""Products of matrices by mma.sync: tiles of A and B come through shared memory by asynchronous copies.

    for each tile of m x n of C, and each part of k, a block                      warps_m x warps_n warps
        for each step of k values                                                 a ring of `stages`
            A [m, k], B [n, k] -> shared memory, stages - 1 steps ahead
            C += A B^T                                                            in registers, 64 x 64 of a warp
        C -> bias, activation, residual -> output                                 epilogue.py
        where k is in parts: C -> the device's memory, and a second launch sums them

Blocks that follow each other work on `swizzle` tiles of rows, so that what they read stays in the second-level cache.
Rows, columns and k behind the last are zeros in shared memory, and not stored.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from ..reading.stages import unravel
from . import ptx
from .epilogue import Epilogue, Sum, row_of
from .host import multiprocessors, on_host
from .matmul_tiles import MatmulTiles
from .products import CHUNK, Operand, Order, Products
from .ptx import WARP, fixed, put, registers, unrolled
from .shared_tile import SharedTile

_PAD = 8  # floats behind a row of sums in shared memory, by which its columns meet each bank once


class Sizes:
    """What the host knows when it launches, as int64 and for kernels as int32."""

    def __init__(self, products: Products, tiles: MatmulTiles) -> None:
        each = tiles.n // len(products.group.products)
        self.rows, self.columns = on_host(products.rows), on_host(products.columns)
        self.depth, self.batch = on_host(products.depth), on_host(products.batch)
        self.m_tiles, self.n_tiles = on_host(_tiles(self.rows, tiles.m)), on_host(_tiles(self.columns, each))
        self.steps = on_host(_tiles(self.depth, tiles.k))
        self.blocks = on_host(self.m_tiles * self.n_tiles * self.batch)

    def parts(self, tiles: MatmulTiles) -> Expr:
        """Into how many parts k is split: enough that the GPU is full, each of some steps."""
        wanted = tirx.truncdiv(multiprocessors(), tirx.max(self.blocks, T.int64(1)))
        most = tirx.truncdiv(self.steps, T.int64(tiles.split_steps))
        return on_host(tirx.max(tirx.min(wanted, most), T.int64(1)))


def matmul_mma(products: Products, a: Operand, bs: list[Operand], tiles: MatmulTiles) -> None:
    """Emits the kernel and its launches into the function that is open."""
    epilogue = Epilogue(products)
    sizes = Sizes(products, tiles)
    with T.If(sizes.blocks > 0), T.Then():
        parts = sizes.parts(tiles)
        count = len(products.group.products)
        elements = sizes.batch * sizes.rows * sizes.columns * count
        partial = T.alloc_buffer((tirx.Select(parts > 1, parts * elements, T.int64(1)),), "float32")
        conditions = [operand.condition for operand in (a, *bs) if operand.condition is not None]

        def launch(chunks: bool) -> None:
            with (
                T.launch_thread("blockIdx.x", sizes.blocks.astype("int32")) as block,
                T.launch_thread("blockIdx.y", parts.astype("int32")) as part,
                T.launch_thread("threadIdx.x", tiles.threads) as thread,
            ):
                _Tile(products, (a, bs), tiles, sizes, epilogue, (block, part, parts, thread), chunks).emit(partial)

        if conditions:
            with T.If(tirx.all(*conditions)):
                with T.Then():
                    launch(True)
                with T.Else():
                    launch(False)
        else:
            launch(True)
        with T.If(parts > 1), T.Then():
            _sum_up(products, sizes, epilogue, parts, partial)


class _Tile:
    """The code of one block."""

    def __init__(
        self,
        products: Products,
        operands: tuple[Operand, list[Operand]],
        tiles: MatmulTiles,
        sizes: Sizes,
        epilogue: Epilogue,
        place: tuple[Expr, Expr, Expr, Expr],
        chunks: bool,
    ) -> None:
        self.products, self.tiles, self.sizes, self.epilogue = products, tiles, sizes, epilogue
        block, self.part, self.parts, self.thread = place
        self.count = len(products.group.products)
        self.each = tiles.n // self.count  # columns of a product
        self.warp_n = self.each // tiles.warps_n  # of which a warp has so many
        self.rows, self.columns = (size.astype("int32") for size in (sizes.rows, sizes.columns))
        self.dtype = products.shape.dtype
        self.find_place(block)
        a, bs = operands
        elements = tiles.shared_memory(products.shape) // 2
        self.memory = T.alloc_buffer((elements,), self.dtype, scope="shared.dyn", align=128)
        stage = (tiles.m + tiles.n) * tiles.k
        self.loaders = [self.loader(a, 0, tiles.m, self.m0, self.rows, chunks)]
        for n, b in enumerate(bs):
            start = (tiles.m + n * self.each) * tiles.k
            self.loaders.append(self.loader(b, start, self.each, self.n0, self.columns, chunks))
        self.stage = stage
        warp = fixed(self.thread // WARP)
        self.lane, self.warp = fixed(self.thread % WARP), warp
        self.warp_row = fixed(warp // tiles.warps_n * tiles.warp_m)
        self.warp_column = fixed(warp % tiles.warps_n * self.warp_n)
        self.m_blocks, self.n_blocks = tiles.warp_m // 16, self.warp_n // 8
        self.C = [registers(self.m_blocks * self.n_blocks * 4, "float32") for _ in bs]
        self.a_words, self.b_words = registers(self.m_blocks * 4, "uint32"), registers(4, "uint32")

    def find_place(self, block: Expr) -> None:
        """m0, n0 and the batch axes of the block's tile."""
        m_tiles, n_tiles = (fixed(n.astype("int32")) for n in (self.sizes.m_tiles, self.sizes.n_tiles))
        per_batch = fixed(m_tiles * n_tiles)
        rest = fixed(block % per_batch)
        wide = fixed(self.tiles.swizzle * n_tiles)
        first = fixed(rest // wide * self.tiles.swizzle)
        high = fixed(tirx.min(m_tiles - first, self.tiles.swizzle))
        within = fixed(rest % wide)
        self.m0, self.n0 = fixed((first + within % high) * self.tiles.m), fixed(within // high * self.each)
        batch = fixed((block // per_batch).astype("int64"))
        axes = self.products.batch_axes
        self.where = {axis.var: fixed(index) for axis, index in zip(axes, unravel(batch, axes))}

    def loader(self, operand: Operand, start: int, rows: int, first: Expr, extent: Expr, chunks: bool) -> _Loader:
        return _Loader(self, operand, start, (rows, first, extent), chunks)

    def emit(self, partial: tirx.Buffer) -> None:
        tiles = self.tiles
        steps = self.sizes.steps.astype("int32")
        per_part = fixed((steps + self.parts.astype("int32") - 1) // self.parts.astype("int32"))
        first = fixed(self.part * per_part)
        last = fixed(tirx.min(first + per_part, steps))
        for C in self.C:
            with unrolled(int(C.shape[0])) as n:
                put(C, n, T.float32(0))
        for s in range(tiles.stages - 1):
            self.load(first + s, tirx.const(s, "int32"), last)
        with T.serial(tirx.max(last - first, 0)) as n:
            ptx.wait_for_copies(tiles.stages - 2)
            ptx.synchronise()
            self.load(first + n + (tiles.stages - 1), (n + (tiles.stages - 1)) % tiles.stages, last)
            self.multiply(n % tiles.stages)
        ptx.wait_for_copies(0)
        ptx.synchronise()
        self.store(partial)

    def load(self, step: Expr, slot: Expr, last: Expr) -> None:
        with T.If(step < last), T.Then():
            for loader in self.loaders:
                loader.copy(fixed(slot * self.stage), fixed(step * self.tiles.k))
        ptx.commit_copies()

    def multiply(self, slot: Expr) -> None:
        """C += A B^T of a stage."""
        at = fixed(slot * self.stage)
        a, *bs = self.loaders
        read_a = a.reader(at, self.warp_row, first=True)
        readers = [b.reader(at, self.warp_column, first=False) for b in bs]
        with unrolled(self.tiles.k // 16) as k:
            with unrolled(self.m_blocks) as m:
                words = [self.a_words[m * 4 + x] for x in range(4)]
                ptx.load_matrices(words, read_a(m, k), transposed=a.order is not Order.K)
            for C, b, read_b in zip(self.C, bs, readers):
                with unrolled(self.n_blocks // 2) as pair:
                    words = [self.b_words[x] for x in range(4)]
                    ptx.load_matrices(words, read_b(pair, k), transposed=b.order is not Order.K)
                    with unrolled(self.m_blocks) as m:
                        for x in range(2):
                            c = [C[(m * self.n_blocks + pair * 2 + x) * 4 + y] for y in range(4)]
                            ours = [self.a_words[m * 4 + y] for y in range(4)]
                            ptx.multiply_add(self.dtype, c, ours, [self.b_words[2 * x], self.b_words[2 * x + 1]])

    def store(self, partial: tirx.Buffer) -> None:
        """C by way of shared memory, 16 rows of a warp at a time, to where threads have whole chunks of a row."""
        width, pitch = self.epilogue.width, self.count * self.warp_n + _PAD
        sums = T.decl_buffer(
            (self.tiles.shared_memory(self.products.shape) // 4,), "float32", data=self.memory.data, scope="shared.dyn"
        )
        mine = fixed(self.warp * (16 * pitch))
        across = self.warp_n // width
        for m in range(self.m_blocks):
            for p, C in enumerate(self.C):
                with unrolled(self.n_blocks) as n:
                    for r in range(2):
                        at = (self.lane // 4 + r * 8) * pitch + p * self.warp_n + n * 8 + self.lane % 4 * 2
                        for x in range(2):
                            put(sums, mine + at + x, C[(m * self.n_blocks + n) * 4 + r * 2 + x])
            ptx.synchronise_warp()
            with T.serial(16 * across // WARP) as n:
                chunk = fixed(n * WARP + self.lane)
                r, c = fixed(chunk // across), fixed(chunk % across * width)
                row = fixed(self.m0 + self.warp_row + m * 16 + r)
                column = fixed(self.n0 + self.warp_column + c)
                with T.If(tirx.all(row < self.rows, column < self.columns)), T.Then():
                    at = fixed(mine + r * pitch + c)
                    found = [row_of(sums, at + p * self.warp_n) for p in range(self.count)]
                    with T.If(self.parts == 1):
                        with T.Then():
                            self.epilogue.store(self.where, row, column, found)
                        with T.Else():
                            self.keep(partial, row, column, found)
            ptx.synchronise_warp()

    def keep(self, partial: tirx.Buffer, row: Expr, column: Expr, sums: list[Sum]) -> None:
        """The sums of a part of k, in the device's memory: [parts, products, batch, rows, columns]."""
        s = self.sizes
        number = self.products_batch()
        for p, of in enumerate(sums):
            start = (self.part.astype("int64") * self.count + p) * s.batch + number
            at = fixed((start * s.rows + row.astype("int64")) * s.columns + column.astype("int64"))
            with unrolled(self.epilogue.width) as x:
                put(partial, at + x.astype("int64"), of(x))

    def products_batch(self) -> Expr:
        number: Expr = T.int64(0)
        for axis in self.products.batch_axes:
            number = number * axis.extent + self.where[axis.var]
        return fixed(number)


class _Loader:
    """Tiles of an operand on their way to shared memory. Rows of a tile lie along the operand's chunks."""

    def __init__(self, tile: _Tile, operand: Operand, start: int, outer: tuple[int, Expr, Expr], chunks: bool) -> None:
        self.tile, self.operand, self.start = tile, operand, start
        self.whole = chunks and operand.order is not Order.NONE
        self.order = Order.OUTER if operand.order is Order.OUTER else Order.K
        size, self.first, self.extent = outer
        depth = tile.tiles.k
        self.rows, length = (size, depth) if self.order is Order.K else (depth, size)
        self.chunks = length // CHUNK
        thread = tile.thread
        self.row, self.chunk = fixed(thread // self.chunks), fixed(thread % self.chunks)
        self.at_once = tile.tiles.threads // self.chunks
        self.passes = self.rows // self.at_once
        self.memory = tile.epilogue.memory[operand.buffer]
        self.starts = registers(self.passes if self.order is Order.K else 1, "int64")
        for n in range(int(self.starts.shape[0])):
            here = self.first + (self.row + n * self.at_once if self.order is Order.K else self.chunk * CHUNK)
            put(self.starts, n, self.start_of(here))

    def start_of(self, outer: Expr) -> Expr:
        return substitute(self.operand.start, {**self.tile.where, self.operand.outer: outer.astype("int64")})

    def along(self, k: Expr) -> Expr:
        return substitute(self.operand.along, {self.operand.k: k.astype("int64")})

    def shared(self, at: Expr) -> SharedTile:
        return SharedTile(self.tile.memory, at + self.start, self.chunks)

    def copy(self, at: Expr, k0: Expr) -> None:
        """The tile from k0 on to the stage at `at`."""
        to, depth = self.shared(at), self.tile.sizes.depth.astype("int32")
        with unrolled(self.passes) as n:
            row = self.row + n * self.at_once
            outer, k = (row, self.chunk * CHUNK) if self.order is Order.K else (self.chunk * CHUNK, row)
            outer, k = fixed(self.first + outer), fixed(k0 + k)
            place = to.at(row, self.chunk)
            if self.whole:
                source = self.starts[n if self.order is Order.K else 0] + self.along(k)
                ptx.copy_chunk(place, self.memory[source], tirx.all(outer < self.extent, k < depth))
            else:
                self.copy_elements(place, outer, k, depth)

    def copy_elements(self, place: ptx.Element, outer: Expr, k: Expr, depth: Expr) -> None:
        """A chunk, element by element: whatever lies between them."""
        with unrolled(CHUNK) as x:
            o, kk = (outer, fixed(k + x)) if self.order is Order.K else (fixed(outer + x), k)
            there = tirx.all(o < self.extent, kk < depth)
            source = self.start_of(o) + self.along(kk)
            zero = tirx.const(0, self.tile.dtype)
            put(self.tile.memory, place.indices[0] + x, T.if_then_else(there, self.memory[source], zero))

    def reader(self, at: Expr, outer: Expr, first: bool) -> Callable[[Expr, Expr], ptx.Element]:
        """(n, k) -> what ldmatrix reads for the n-th 16 rows (or columns) from `outer` on, and the k-th 16 values of k.

        first: as operand A of mma.sync, whose matrices come in another order than those of B.
        """
        lane, tile = self.tile.lane, self.shared(at)
        low, high = lane % 8, lane // 8
        if self.order is Order.K:
            inner, k = (high % 2, high // 2) if first else (high // 2, high % 2)
            read = tile.reader(fixed(outer + inner * 8 + low), k)
            return lambda n, step: read(n * 16, step * 2)
        inner, k = (high % 2, high // 2) if first else (high // 2, high % 2)
        read = tile.reader(fixed(k * 8 + low), fixed(outer // CHUNK + inner))
        return lambda n, step: read(step * 16, n * 2)


def _sum_up(products: Products, sizes: Sizes, epilogue: Epilogue, parts: Expr, partial: tirx.Buffer) -> None:
    """The launch that adds the parts of k, a thread for `width` columns of a row."""
    width, threads, count = epilogue.width, 256, len(products.group.products)
    across = on_host(_tiles(sizes.columns, width))
    total = on_host(sizes.batch * sizes.rows * across)
    with (
        T.launch_thread("blockIdx.x", _tiles(total, threads).astype("int32")) as block,
        T.launch_thread("threadIdx.x", threads) as thread,
    ):
        number = fixed(block.astype("int64") * threads + thread)
        with T.If(number < total), T.Then():
            line = fixed(number // across)
            column = fixed(number % across * width)
            batch, row = fixed(line // sizes.rows), fixed(line % sizes.rows)
            axes = products.batch_axes
            where = {axis.var: fixed(index) for axis, index in zip(axes, unravel(batch, axes))}
            sums = registers(count * width, "float32")
            with unrolled(count * width) as n:
                put(sums, n, T.float32(0))
            with T.serial(parts.astype("int32")) as part:
                for p in range(count):
                    start = ((part.astype("int64") * count + p) * sizes.batch + batch) * sizes.rows + row
                    at = fixed(start * sizes.columns + column)
                    with unrolled(width) as x:
                        put(sums, p * width + x, sums[p * width + x] + partial[at + x.astype("int64")])
            epilogue.store(where, row, column, [row_of(sums, p * width) for p in range(count)])


def _tiles(size: Expr, each: int) -> Expr:
    return tirx.truncdiv(size + (each - 1), T.int64(each))
