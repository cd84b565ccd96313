"""Matmuls by mma.sync: tiles of A and B come through shared memory by asynchronous copies.

    for each tile of m x n of C, and each split of k, a block                     warps_m x warps_n warps
        for each step of k values                                                 a ring of `stages`
            A [m, k], B [n, k] -> shared memory, stages - 1 steps ahead           quantized: through registers
            C += A B^T                                                            in registers, 64 x 64 of a warp,
                                                                                  float32 as tensor_types.py says
        C -> bias, activation, residual -> output                                 epilogue.py
        split-K: C -> the device's memory, and a second launch adds them

Consecutive blocks process `swizzle` rows of tiles, so that their operands stay in the second-level cache. Rows, columns
and k after the last one are zeros in shared memory, and are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, substitute

from ..primitives import ptx
from ..primitives.host import sm_count
from ..primitives.ptx import WARP, alloc_registers, alloc_shared_memory, let, store_element, unrolled
from ..primitives.shared_tile import SharedTile
from .dequantizer import Dequantizer
from .epilogue import Epilogue
from .matmul_accumulators import AccumulatorFragment, AccumulatorStore
from .matmul_grid import Grid
from .matmul_reader import Matmuls, Operand, Order
from .matmul_tiles import MatmulTiles


def matmul_mma(matmuls: Matmuls, a: Operand, bs: list[Operand], tiles: MatmulTiles) -> None:
    """Emit the kernel and its launches into the function being built."""
    epilogue, grid = Epilogue(matmuls), Grid(matmuls, tiles)
    with T.If(grid.blocks > 0), T.Then():
        grid.split(sm_count())
        accumulators = AccumulatorStore(grid, epilogue)
        conditions = [operand.condition for operand in (a, *bs) if operand.condition is not None]

        def launch(chunks: bool) -> None:
            with (
                T.launch_thread("blockIdx.x", grid.blocks.astype("int32")) as block,
                T.launch_thread("blockIdx.y", grid.splits.astype("int32")) as split,
                T.launch_thread("threadIdx.x", tiles.threads) as thread,
            ):
                _Tile(grid, tiles, accumulators, (a, bs), (block, split, thread), chunks).emit()

        if conditions:
            with T.If(tirx.all(*conditions)):
                with T.Then():
                    launch(True)
                with T.Else():
                    launch(False)
        else:
            launch(True)
        with T.If(grid.shares > 0), T.Then():
            accumulators.add_partials()


class _Tile:
    """The code of one block."""

    def __init__(
        self,
        grid: Grid,
        tiles: MatmulTiles,
        accumulators: AccumulatorStore,
        operands: tuple[Operand, list[Operand]],
        position: tuple[Expr, Expr, Expr],
        chunks: bool,
    ) -> None:
        self.grid, self.tiles, self.accumulators = grid, tiles, accumulators
        block, split, self.thread = position
        self.unit = grid.split_unit(block, split)
        self.position = self.unit.position
        shape = grid.matmuls.shape
        self.type, (a, bs) = shape.type, operands
        self.warp_n = grid.columns_per_matmul // tiles.warps_n  # columns of a matmul per warp
        elements = tiles.shared_memory(shape) // self.type.bytes
        self.memory = alloc_shared_memory(elements, self.type.element, 128)
        self.stage = (tiles.m + tiles.n) * tiles.k
        outer = (tiles.m, self.position.m0, grid.rows.astype("int32"))
        self.loaders = [_Loader(self, a, 0, outer, chunks)]
        outer = (grid.columns_per_matmul, self.position.n0, grid.columns.astype("int32"))
        for n, b in enumerate(bs):
            loader = _Loader if b.quantized is None else _QuantizedLoader
            self.loaders.append(loader(self, b, (tiles.m + n * grid.columns_per_matmul) * tiles.k, outer, chunks))
        self.lane, self.warp = let(self.thread % WARP), let(self.thread // WARP)
        self.warp_row = let(self.warp // tiles.warps_n * tiles.warp_m)
        self.warp_column = let(self.warp % tiles.warps_n * self.warp_n)
        self.m_blocks, self.n_blocks = tiles.warp_m // 16, self.warp_n // 8
        self.C = [alloc_registers(self.m_blocks * self.n_blocks * 4, "float32") for _ in bs]
        self.a_registers = alloc_registers(self.m_blocks * 4 * self.type.operand_count, "uint32")
        self.b_registers = alloc_registers(4 * self.type.operand_count, "uint32")

    def emit(self) -> None:
        tiles = self.tiles
        first, last = self.unit.first, self.unit.last
        for C in self.C:
            with unrolled(int(C.shape[0])) as n:
                store_element(C, n, T.float32(0))
        for s in range(tiles.stages - 1):
            self.load(first + s, tirx.const(s, "int32"), last)
            self.dequantize(first + s, tirx.const(s, "int32"), last)
        with T.serial(last - first) as n:
            ptx.wait_for_copies(tiles.stages - 2)
            ptx.synchronize()
            step, slot = first + n + (tiles.stages - 1), (n + (tiles.stages - 1)) % tiles.stages
            self.load(step, slot, last)
            self.multiply(n % tiles.stages)
            self.dequantize(step, slot, last)
        ptx.synchronize()  # accumulators reuse the memory of the stages, which no copy in flight writes any more
        self.store()

    def load(self, step: Expr, slot: Expr, last: Expr) -> None:
        with T.If(step < last), T.Then():
            for loader in self.loaders:
                loader.copy(let(slot * self.stage), let(step * self.tiles.k))
        ptx.commit_copies()

    def dequantize(self, step: Expr, slot: Expr, last: Expr) -> None:
        """Dequantize the values that `load` requested, after other work."""
        dequantizers = [
            quantized_loader for quantized_loader in self.loaders if isinstance(quantized_loader, _QuantizedLoader)
        ]
        if dequantizers:
            with T.If(step < last), T.Then():
                for quantized_loader in dequantizers:
                    quantized_loader.dequantize(let(slot * self.stage))

    def multiply(self, slot: Expr) -> None:
        """Emit C += A B^T of a stage."""
        at, operands = let(slot * self.stage), range(self.type.operand_count)
        a, *bs = self.loaders
        read_a = a.make_reader(at, self.warp_row, first=True)
        readers = [b.make_reader(at, self.warp_column, first=False) for b in bs]
        a_count = self.m_blocks * 4
        with unrolled(self.tiles.k // self.type.depth) as k:
            with unrolled(self.m_blocks) as m:
                read_a([self.a_registers[m * 4 + x] for x in range(4)], m, k)
            self.type.split(self.a_registers, a_count)
            for C, read_b in zip(self.C, readers):
                with unrolled(self.n_blocks // 2) as pair:
                    read_b([self.b_registers[x] for x in range(4)], pair, k)
                    self.type.split(self.b_registers, 4)
                    with unrolled(self.m_blocks) as m:
                        for x in range(2):
                            c = [C[(m * self.n_blocks + pair * 2 + x) * 4 + y] for y in range(4)]
                            a_fragments = [
                                [self.a_registers[operand * a_count + m * 4 + y] for y in range(4)]
                                for operand in operands
                            ]
                            b_fragments = [
                                [self.b_registers[operand * 4 + 2 * x + y] for y in range(2)] for operand in operands
                            ]
                            self.type.multiply_add(c, a_fragments, b_fragments)

    def store(self) -> None:
        size = self.tiles.shared_memory(self.grid.matmuls.shape) // 4
        memory = T.decl_buffer((size,), "float32", data=self.memory.data, scope="shared.dyn")
        warp_offset = let(self.warp * (16 * self.accumulators.pitch(self.warp_n)))
        for m in range(self.m_blocks):

            def fragment(C: tirx.Buffer, m: int = m) -> AccumulatorFragment:
                return lambda n, y: C[(m * self.n_blocks + n) * 4 + y]

            row0 = let(self.position.m0 + self.warp_row + m * 16)
            rows = (row0, let(self.position.n0 + self.warp_column), self.warp_n)
            self.accumulators.store_fragments(
                self.unit, rows, [fragment(C) for C in self.C], (memory, warp_offset), self.lane
            )


class _Loader:
    """Copies tiles of an operand to shared memory. Rows of a tile run along the operand's chunks."""

    def __init__(self, tile: _Tile, operand: Operand, start: int, outer: tuple[int, Expr, Expr], chunks: bool) -> None:
        self.tile, self.operand, self.start = tile, operand, start
        self.copies_chunks = chunks and operand.order is not Order.NONE
        self.order = Order.OUTER if operand.order is Order.OUTER else Order.K
        size, self.first, self.extent = outer
        depth = tile.tiles.k
        self.rows, length = (size, depth) if self.order is Order.K else (depth, size)
        self.chunk_size = tile.type.chunk
        self.chunks = length // self.chunk_size
        thread = tile.thread
        self.row, self.chunk = let(thread // self.chunks), let(thread % self.chunks)
        self.rows_per_pass = tile.tiles.threads // self.chunks
        self.passes = self.rows // self.rows_per_pass
        self.memory = tile.accumulators.epilogue.memory[operand.buffer]
        self.starts = alloc_registers(self.passes if self.order is Order.K else 1, "int64")
        for n in range(int(self.starts.shape[0])):
            index = self.first + (
                self.row + n * self.rows_per_pass if self.order is Order.K else self.chunk * self.chunk_size
            )
            store_element(self.starts, n, self.start_of(index))

    def start_of(self, outer: Expr) -> Expr:
        return substitute(
            self.operand.start, {**self.tile.position.batch_indices, self.operand.outer: outer.astype("int64")}
        )

    def along(self, k: Expr) -> Expr:
        return substitute(self.operand.along, {self.operand.k: k.astype("int64")})

    def shared_tile(self, at: Expr) -> SharedTile:
        down = self.order is Order.OUTER and self.tile.type.bytes == 4
        return SharedTile(self.tile.memory, at + self.start, self.chunks, down)

    def copy(self, at: Expr, k0: Expr) -> None:
        """Copy the tile from k0 on to the stage at `at`."""
        tile, depth = self.shared_tile(at), self.tile.grid.depth.astype("int32")
        with unrolled(self.passes) as n:
            row = self.row + n * self.rows_per_pass
            along = self.chunk * self.chunk_size
            outer, k = (row, along) if self.order is Order.K else (along, row)
            outer, k = let(self.first + outer), let(k0 + k)
            target = tile.at(row, self.chunk)
            if self.copies_chunks:
                source = self.starts[n if self.order is Order.K else 0] + self.along(k)
                ptx.copy_chunk(target, self.memory[source], tirx.all(outer < self.extent, k < depth))
            else:
                self.copy_elements(target, outer, k, depth)

    def copy_elements(self, target: ptx.Element, outer: Expr, k: Expr, depth: Expr) -> None:
        """Copy a chunk element by element, whatever their strides."""
        with unrolled(self.chunk_size) as x:
            o, kk = (outer, let(k + x)) if self.order is Order.K else (let(outer + x), k)
            exists = tirx.all(o < self.extent, kk < depth)
            source = self.start_of(o) + self.along(kk)
            zero = tirx.const(0, self.tile.type.element)
            store_element(self.tile.memory, target.indices[0] + x, T.if_then_else(exists, self.memory[source], zero))

    def make_reader(self, at: Expr, outer: Expr, first: bool) -> Callable[[Sequence[ptx.Element], Expr, Expr], None]:
        """Return a function (fragment, n, k) that loads the operands of mma.sync.

        They are those of the n-th 16 rows (or columns) from `outer` on, and of the k-th matmul. With `first` they are
        operand A of mma.sync, whose matrices are in another order than those of B.
        """
        lane, tile = self.tile.lane, self.shared_tile(at)
        low, high = lane % 8, lane // 8
        inner, k = (high % 2, high // 2) if first else (high // 2, high % 2)
        if self.order is Order.K:
            along_k = tile.make_reader(let(outer + inner * 8 + low), k)
            return lambda fragment, n, step: ptx.load_matrices(fragment, along_k(n * 16, step * 2))
        if not tile.down:
            across = tile.make_reader(let(k * 8 + low), let(outer // self.chunk_size + inner))
            return lambda fragment, n, step: ptx.load_matrices(fragment, across(step * 16, n * 2), transposed=True)
        read_element = tile.make_reader(lane % 4, let(outer // 4 + lane // 16))
        within = let(lane // 4 % 4)

        def read_elements(fragment: Sequence[ptx.Element], n: Expr, step: Expr) -> None:
            for x, register in enumerate(fragment):
                row, column = (x // 2, x % 2) if first else (x % 2, x // 2)
                element = read_element(step * 8 + row * 4, n * 4 + column * 2)
                value = self.tile.memory[element.indices[0] + within]
                store_element(register.source, register.indices[0], T.reinterpret("uint32", value))

        return read_elements


class _QuantizedLoader(_Loader):
    """Loads a quantized operand, whose chunks a thread keeps in registers until they are dequantized.

    Only columns that exist are stored, and A is 0 after the last k, so other values must only be finite.
    """

    def __init__(self, tile: _Tile, operand: Operand, start: int, outer: tuple[int, Expr, Expr], chunks: bool) -> None:
        super().__init__(tile, operand, start, outer, chunks)
        assert operand.quantized is not None
        self.dequantizer = Dequantizer(operand.quantized, tile.type.element, tile.accumulators.epilogue.memory)
        self.fetched = alloc_registers(self.passes * self.dequantizer.registers, "uint32")
        self.scales = [alloc_registers(2, "float32") for _ in range(self.passes)]

    def copy(self, at: Expr, k0: Expr) -> None:
        """Copy the quantized values to registers."""
        k, count = let(k0 + self.chunk * self.chunk_size), self.dequantizer.registers
        for n in range(self.passes):
            column = let(self.first + self.row + n * self.rows_per_pass)
            exists = tirx.all(column < self.extent, k < self.tile.grid.depth.astype("int32"))
            for x in range(count):
                store_element(self.fetched, n * count + x, T.uint32(0))
            with T.If(exists), T.Then():
                self.dequantizer.fetch(self.fetched, n * count, self.starts[n] + k.astype("int64"), 1)
            stored = let(column + substitute(self.operand.first, self.tile.position.batch_indices).astype("int32"))
            self.dequantizer.load_scale_and_zero(self.scales[n], stored, k, exists)

    def dequantize(self, at: Expr) -> None:
        """Dequantize to the stage at `at`."""
        tile, packed = self.shared_tile(at), alloc_registers(4, "uint32")
        for n in range(self.passes):
            self.dequantizer.dequantize(packed, 0, self.fetched, n * self.dequantizer.registers, self.scales[n])
            target = tile.at(self.row + n * self.rows_per_pass, self.chunk)
            ptx.store_chunk(target, packed)
