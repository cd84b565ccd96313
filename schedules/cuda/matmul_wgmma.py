"""Products of matrices on Hopper (sm_90a): TMA, wgmma, and warpgroups of their own for both, as in CUTLASS.

    producer warpgroup                          consumer warpgroups, 64 rows of the tile each
    for each tile of this block                 for each tile of this block
        for each step of 64 values of k             for each step
            A [m, 64], B [n, 64] -> ring                C += A B^T, one step's products behind the next one's
                                                    C -> epilogue, while the next tile's steps arrive

The grid has as many blocks as the machine has multiprocessors. Two blocks below each other may be a cluster: each
brings half of a tile of B, for both (multicast), so that the second-level cache is asked for it once. A slot of the
ring is empty when the consumers of both have let go of it. Where tiles of rows are few and odd there are no clusters,
as half of one would have no rows, and where tiles are few there are narrow ones: the host chooses between two launches.
B comes as rows of k, or as ONNX writes it, k down and columns across: wgmma takes either. What lies outside the
matrices arrives as zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr, is_int, substitute, uses

from . import wgmma
from .epilogue import Epilogue
from .host import multiprocessors, on_host
from .matmul_grid import Grid, Place
from .matmul_sums import Fragment, Sums
from .matmul_tiles import WgmmaMatmulTiles
from .pipeline import Ring, initialise, specialise
from .products import Operand, Order, Products
from .ptx import WARP, fixed, put, registers, synchronise, synchronise_cluster
from .shared_tile import CHUNK
from .tma import COLUMNS, L2_PROMOTION_128B, ROW_BYTES, ROW_WORDS, SWIZZLE_128B

ROWS = 64  # of a consumer
_ALIGNMENT = 1024  # bytes, of swizzled tiles
_MANY = 4  # clusters above each other of which the last may be part empty


@dataclass(frozen=True)
class Reach:
    """An operand as a tensor of TMA: elements between neighbours along its rows (or columns), and along batch axes."""

    operand: Operand
    outer: Expr
    batch: tuple[tuple[tirx.Var, Expr, Expr], ...]
    """Batch axes that it has, with their extents and strides."""


def reach(products: Products, operand: Operand) -> Reach | None:
    """The operand for TMA: in chunks at all sizes, and equally far apart along every axis; None for any other."""
    simplify = products.facts.simplify
    start, along = operand.start, operand.along
    if operand.condition is not None or operand.order is Order.NONE or operand.codes is not None:
        return None

    def stride(expr: Expr, var: tirx.Var) -> Expr | None:
        step = simplify(substitute(expr, {var: var + 1}) - expr)
        variables = {operand.outer, operand.k, *(axis.var for axis in products.batch_axes)}
        return None if uses(step, variables) else step

    outer, k = stride(start, operand.outer), stride(along, operand.k)
    batch = [(axis.var, axis.extent, stride(start, axis.var)) for axis in products.batch_axes]
    if outer is None or k is None or any(step is None for *_, step in batch):
        return None
    zero = tirx.const(0, "int64")
    everywhere = {operand.outer: zero, **{axis.var: zero for axis in products.batch_axes}}
    if not is_int(simplify(substitute(start, everywhere)), 0):
        return None
    there = tuple((var, extent, step) for var, extent, step in batch if step is not None and not is_int(step, 0))
    strides = [outer if operand.order is Order.K else k, *(step for *_, step in there)]
    whole = all(is_int(simplify(step % CHUNK), 0) for step in strides)
    return Reach(operand, outer if operand.order is Order.K else k, there) if whole and len(there) <= 3 else None


def matmul_wgmma(
    products: Products, a: Reach, bs: list[Reach], tiles: WgmmaMatmulTiles, narrow: WgmmaMatmulTiles | None = None
) -> None:
    """Emits the kernels and their launches into the function that is open. A lies in chunks along k.

    Sizes that are too small for `tiles`, as they leave multiprocessors or half of a cluster without work, get `narrow`
    ones, or no clusters.
    """
    epilogue, facts = Epilogue(products), products.facts
    m_tiles = tirx.ceildiv(products.rows, tiles.m)
    even = tirx.EQ(tirx.floormod(m_tiles, tiles.cluster), tirx.const(0, "int64"))
    whole = facts.simplify(tirx.any(even, m_tiles >= _MANY * tiles.cluster))
    single = dataclasses.replace(tiles, cluster=1) if narrow is None else narrow

    def emit(tiles: WgmmaMatmulTiles) -> None:
        _emit(products, a, bs, tiles, epilogue)

    if narrow is None and isinstance(whole, tirx.IntImm):
        emit(tiles if whole.value else single)
        return
    if narrow is not None:
        columns = tirx.ceildiv(products.columns * len(bs), tiles.n)
        whole = tirx.all(whole, m_tiles * columns * products.batch >= multiprocessors())
    with T.If(on_host(whole) > 0):
        with T.Then():
            emit(tiles)
        with T.Else():
            emit(single)


def _emit(products: Products, a: Reach, bs: list[Reach], tiles: WgmmaMatmulTiles, epilogue: Epilogue) -> None:
    grid = Grid(products, tiles, tiles.cluster)
    with T.If(grid.blocks > 0), T.Then():
        grid.split()
        sums = Sums(grid, epilogue)
        _launch(grid, sums, a, bs, tiles)
        with T.If(grid.parts > 1), T.Then():
            sums.add_parts()


def _launch(grid: Grid, sums: Sums, a: Reach, bs: list[Reach], tiles: WgmmaMatmulTiles) -> None:
    """Blocks in clusters as the tiles have it, and the grid."""
    maps = [_Map(grid, sums.epilogue, a, grid.rows, tiles.m, 1)]
    maps += [_Map(grid, sums.epilogue, b, grid.columns, grid.each, tiles.cluster) for b in bs]
    work = on_host(grid.blocks * grid.parts)
    most = multiprocessors() if tiles.blocks is None else T.int64(tiles.blocks)
    clusters = on_host(tirx.min(work, tirx.max(tirx.truncdiv(most, tiles.cluster), T.int64(1))))
    with ExitStack() as stack:
        if tiles.cluster > 1:
            stack.enter_context(T.launch_thread("clusterCtaIdx.x", tiles.cluster))
        blocks = (clusters * tiles.cluster).astype("int32")
        block = stack.enter_context(T.launch_thread("blockIdx.x", blocks))
        thread = stack.enter_context(T.launch_thread("threadIdx.x", tiles.threads))
        _Block(grid, tiles, sums, maps, (block, thread), (work, clusters)).emit()


class _Map:
    """Tiles of an operand: 64 values of k by `size` rows or columns, as wgmma reads them. `blocks` of a cluster bring
    one together: each has its share of the rows of 128 bytes."""

    def __init__(self, grid: Grid, epilogue: Epilogue, found: Reach, extent: Expr, size: int, blocks: int) -> None:
        self.reach, self.size, self.along_k, self.blocks = found, size, found.operand.order is Order.K, blocks
        self.share = (size if self.along_k else COLUMNS) // blocks
        memory = epilogue.memory[found.operand.buffer]
        inner, rows = (grid.depth, extent) if self.along_k else (extent, grid.depth)
        sizes = [inner, rows, *(axis_extent for _, axis_extent, _ in found.batch)]
        strides = [step * 2 for step in (found.outer, *(step for *_, step in found.batch))]
        box = [COLUMNS, self.share, *(1 for _ in found.batch)]
        self.rank, self.handle = len(sizes), T.bind(T.tvm_stack_alloca("tensormap", 1))
        # A dimension of one element may have any stride, which has to be one that the driver takes.
        strides = [tirx.max(step, T.int64(16)) for step in strides]
        T.evaluate(
            T.tensormap_encode_tiled(
                self.handle, memory.data, *sizes, *strides, *box, *(1 for _ in sizes),
                descriptor_dtype=str(memory.dtype), rank=self.rank, swizzle=SWIZZLE_128B,
                l2_promotion=L2_PROMOTION_128B,
            )
        )  # fmt: skip

    @property
    def words(self) -> int:
        """Of 4 bytes, of a tile in shared memory."""
        return self.size * ROW_BYTES // 4

    def load(
        self, memory: tirx.Buffer, at: Expr, place: Place, at_k: tuple[Expr, Expr], block: Expr, told: Expr
    ) -> None:
        """One thread: memory[at:] := the tile at (outer, k), told to the barrier; of one for a cluster this block's
        share, which goes to all."""
        name = f"cp.async.bulk.tensor.{self.rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
        (outer, k), mask = at_k, [] if self.blocks == 1 else [tirx.const((1 << self.blocks) - 1, "uint16")]
        instruction = T.ptx[f"{name}.multicast::cluster" if mask else name]
        batch = [place.where[var].astype("int32") for var, *_ in self.reach.batch]
        first = block * self.share if mask else T.int32(0)
        at = at + first * ROW_WORDS

        def copy(at: Expr, *where: Expr) -> None:
            target = memory.ptr_to([at])
            T.evaluate(instruction(target, T.address_of(self.handle), *where, *batch, told, *mask))

        if self.along_k:
            copy(at, k, outer + first)
            return
        for panel in range(self.size // COLUMNS):
            copy(at + panel * (COLUMNS * ROW_WORDS), outer + panel * COLUMNS, k + first)


class _Block:
    """The code for one thread block."""

    def __init__(
        self,
        grid: Grid,
        tiles: WgmmaMatmulTiles,
        sums: Sums,
        maps: list[_Map],
        place: tuple[Expr, Expr],
        work: tuple[Expr, Expr],
    ) -> None:
        self.grid, self.tiles, self.sums, self.maps = grid, tiles, sums, maps
        block, self.thread = place
        # Of the block in its cluster, and of that; computed anew where they are needed.
        self.rank, self.cluster = tirx.truncmod(block, tiles.cluster), tirx.truncdiv(block, tiles.cluster)
        self.work, self.clusters = (n.astype("int32") for n in work)
        shape = grid.products.shape
        words = tiles.shared_memory(shape) // 4
        self.memory = T.alloc_buffer((words,), "uint32", scope="shared.dyn", align=_ALIGNMENT)
        self.barriers = T.alloc_buffer((2 * tiles.stages,), "uint64", scope="shared", align=8)
        self.ring = Ring(self.barriers, 0, tiles.stages, tiles.consumers * 4, tiles.cluster)
        # Tiles of A, of all stages, then those of B.
        self.starts, at = [], 0
        for each in maps:
            self.starts.append(at)
            at += tiles.stages * each.words
        self.behind = at

    def emit(self) -> None:
        initialise(self.thread, [self.ring])
        together = self.tiles.cluster > 1
        synchronise_cluster() if together else synchronise()
        specialise(self.tiles, self.thread, self.produce, self.consume)
        if together:
            synchronise_cluster()  # the other block may still let go of slots here

    def each_tile(self, body: Callable[[Place, Expr, Expr, Expr], None]) -> None:
        """body(place, part, first step, last step) for the tiles, and parts of k, of this block."""
        count, clusters = fixed(self.grid.blocks.astype("int32")), fixed(self.clusters)
        with T.serial(tirx.truncdiv(self.work - self.cluster + clusters - 1, clusters)) as turn:
            number = fixed(self.cluster + turn * clusters)
            part = fixed(tirx.truncdiv(number, count))
            place = self.grid.place(fixed(tirx.truncmod(number, count)))
            place = dataclasses.replace(place, m0=fixed(place.m0 + self.rank * self.tiles.m))
            body(place, part, *self.grid.steps_of(part))

    def produce(self) -> None:
        """One thread: the tiles of A and B on their way."""
        fills = registers(1, "int32")
        put(fills, 0, 0)
        total = sum(each.words * 4 for each in self.maps)

        def tile(place: Place, part: Expr, first: Expr, last: Expr) -> None:
            with T.serial(last - first) as n:
                fill = fixed(fills[0] + n)
                self.ring.reserve(fill, total)
                for each, start, outer in zip(self.maps, self.starts, (place.m0, *(place.n0 for _ in self.maps))):
                    at = start + self.ring.slot(fill) * each.words
                    k = fixed((first + n) * self.tiles.k)
                    each.load(self.memory, at, place, (outer, k), self.rank, self.ring.full(fill))
            put(fills, 0, fills[0] + (last - first))

        self.each_tile(tile)

    def consume(self, w: Expr) -> None:
        """Consumer w: rows [64 w, 64 w + 64) of each tile."""
        lane = fixed(tirx.truncmod(self.thread, WARP))
        warp = fixed(tirx.truncmod(tirx.truncdiv(self.thread, WARP), 4))
        a_map, *b_maps = self.maps
        # A consumer has 64 rows of each tile of A.
        a_tile = wgmma.descriptor(self.memory, fixed(w * (ROWS * ROW_BYTES // 4)), self.tiles.m)
        b_tiles = [
            wgmma.descriptor(self.memory, start, b.size if b.along_k else COLUMNS)
            for b, start in zip(b_maps, self.starts[1:])
        ]
        C = [registers(self.grid.each // 2, "float32") for _ in b_maps]
        fills = registers(1, "int32")
        put(fills, 0, 0)

        def tile(place: Place, part: Expr, first: Expr, last: Expr) -> None:
            for c in C:
                with T.unroll(self.grid.each // 2) as n:
                    put(c, n, T.float32(0))
            for c in C:
                wgmma.fence(c)  # nothing may touch it from here on, until all products are done
            with T.serial(last - first) as n:
                fill = fixed(fills[0] + n)
                self.ring.wait(fill)
                slot = self.ring.slot(fill)
                wgmma.begin()
                for c, b, b_tile in zip(C, b_maps, b_tiles):
                    ours = a_tile + (slot * (a_map.words * 4 // wgmma.UNIT)).astype("uint64")
                    theirs = b_tile + (slot * (b.words * 4 // wgmma.UNIT)).astype("uint64")
                    wgmma.add_product(self.grid.products.shape.dtype, c, ours, theirs, self.tiles.k, b.along_k)
                wgmma.commit()
                wgmma.wait(1)
                with T.If(n > 0), T.Then():
                    self.ring.release(fill - 1, lane)
            wgmma.wait(0, *C)
            with T.If(last > first), T.Then():
                self.ring.release(fills[0] + (last - first) - 1, lane)
            put(fills, 0, fills[0] + (last - first))
            self.store(place, part, C, fixed(w * 4 + warp), lane)

        self.each_tile(tile)

    def store(self, place: Place, part: Expr, C: list[tirx.Buffer], warp: Expr, lane: Expr) -> None:
        """The 16 rows of a warp, some columns at a time."""
        words = self.tiles.shared_memory(self.grid.products.shape) // 4
        memory = T.decl_buffer((words,), "float32", data=self.memory.data, scope="shared.dyn")
        columns = self.tiles.piece // self.grid.count
        mine = fixed(self.behind + warp * (16 * self.sums.pitch(columns)))
        for first in range(0, self.grid.each, columns):

            def fragment(c: tirx.Buffer, first: int = first) -> Fragment:
                return lambda n, y: c[first // 2 + n * 4 + y]

            rows = (fixed(place.m0 + warp * 16), fixed(place.n0 + first), columns)
            self.sums.store(place, part, rows, [fragment(c) for c in C], (memory, mine), lane)
