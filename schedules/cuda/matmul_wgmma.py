"""Matmuls of matrices on Hopper (sm_90a): TMA, wgmma, and warpgroups of their own for both, as in CUTLASS.

    producer warpgroup                          consumer warpgroups, 64 rows of the tile each
    for each tile of this block                 for each tile of this block
        for each step of 64 values of k             for each step
            A [m, 64], B [n, 64] -> ring                C += A B^T, one step's matmuls behind the next one's
                                                    C -> epilogue, while the next tile's steps arrive

That is cooperative. By ping-pong consumers have tiles of 64 rows of their own, in turn, so that the epilogue of one
runs beside the matmuls of the other:

    consumer 0    tile 0: C += A B^T, turn to 1    C -> epilogue                      tile 2 ...
    consumer 1                                     tile 1: C += A B^T, turn to 0      C -> epilogue

The grid has as many blocks as the machine has SMs. Two blocks below each other may be a cluster: each
brings half of a tile of B, for both (multicast), so that the second-level cache is asked for it once. A slot of the
ring is empty when the consumers of both have let go of it. Where tiles of rows are few and odd there are no clusters,
as half of one would have no rows, and where tiles are few there are narrow ones: the host chooses between two launches.
Where rows choose their matrices by a table, a tile is multiplied once for each run of rows with one matrix, from the
first row of the run on, and of the sums those of its rows are stored: a grouped GEMM.
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

from lowering.tensorir.expressions import Expr

from ..reading.selection import Selection
from . import wgmma
from .epilogue import Epilogue
from .host import on_host, sm_count
from .matmul_grid import Grid, Piece, Place
from .matmul_reader import Matmuls, Order
from .matmul_sums import Fragment, Sums
from .matmul_tiles import WgmmaMatmulTiles
from .pipeline import WARPGROUP, Ring, initialize, named_arrive, named_sync, specialize
from .ptx import WARP, int32, let, put, registers, shared_memory, synchronize, synchronize_cluster
from .reach import Reach
from .runs import each_run
from .tma import COLUMNS, L2_PROMOTION_128B, ROW_BYTES, ROW_WORDS, SWIZZLE_128B

ROWS = 64  # of a consumer
_ALIGNMENT = 1024  # bytes, of swizzled tiles
_FIRST_TURN = 1  # a named barrier; that of the other consumer follows
LONG_RUNS = 96  # rows of a matrix from which on wide tiles are faster; measured on an H200 between 64 and 128
_MANY = 4  # clusters above each other of which the last may be part empty


def matmul_wgmma(
    matmuls: Matmuls, a: Reach, bs: list[Reach], tiles: WgmmaMatmulTiles, narrow: WgmmaMatmulTiles | None = None
) -> None:
    """Emits the kernels and their launches into the function that is open. A lies in chunks along k.

    Sizes that are too small for `tiles`, as they leave SMs or half of a cluster without work, get `narrow`
    ones, or no clusters. So do rows that choose their matrices, where few choose the same one.
    """
    epilogue, facts = Epilogue(matmuls), matmuls.facts
    if matmuls.selection is not None:
        tiles = dataclasses.replace(tiles, cluster=1)  # runs end anywhere: blocks have no rows of one matrix in common
    m_tiles = tirx.ceildiv(matmuls.rows, tiles.m)
    even = tirx.EQ(tirx.floormod(m_tiles, tiles.cluster), tirx.const(0, "int64"))
    whole = facts.simplify(tirx.any(even, m_tiles >= _MANY * tiles.cluster))
    single = dataclasses.replace(tiles, cluster=1) if narrow is None else narrow

    def emit(tiles: WgmmaMatmulTiles) -> None:
        _emit(matmuls, a, bs, tiles, epilogue)

    if narrow is None and isinstance(whole, tirx.IntImm):
        emit(tiles if whole.value else single)
        return
    if matmuls.selection is not None:
        whole = matmuls.rows >= LONG_RUNS * matmuls.selection.count
    elif narrow is not None:
        columns = tirx.ceildiv(matmuls.columns * len(bs), tiles.n)
        whole = tirx.all(whole, m_tiles * columns * matmuls.batch >= sm_count())
    with T.If(on_host(whole) > 0):
        with T.Then():
            emit(tiles)
        with T.Else():
            emit(single)


def _emit(matmuls: Matmuls, a: Reach, bs: list[Reach], tiles: WgmmaMatmulTiles, epilogue: Epilogue) -> None:
    grid = Grid(matmuls, tiles, tiles.cluster)
    with T.If(grid.blocks > 0), T.Then():
        most = sm_count() if tiles.blocks is None else T.int64(tiles.blocks)
        clusters = on_host(tirx.max(tirx.truncdiv(most, tiles.cluster), T.int64(1)))
        grid.deal(clusters) if matmuls.selection is None else grid.keep_whole()
        sums = Sums(grid, epilogue)
        _launch(grid, sums, a, bs, tiles, clusters)
        if matmuls.selection is None:
            with T.If(grid.shares > 0), T.Then():
                sums.add_parts()


def _launch(grid: Grid, sums: Sums, a: Reach, bs: list[Reach], tiles: WgmmaMatmulTiles, most: Expr) -> None:
    """Blocks in clusters as the tiles have it, and the grid of at most so many."""
    maps = [_Map(grid, sums.epilogue, a, grid.rows, tiles.m, 1)]
    maps += [_Map(grid, sums.epilogue, b, grid.columns, grid.each, tiles.cluster) for b in bs]
    clusters = on_host(tirx.min(grid.whole + grid.shares, most))
    with ExitStack() as stack:
        if tiles.cluster > 1:
            stack.enter_context(T.launch_thread("clusterCtaIdx.x", tiles.cluster))
        blocks = (clusters * tiles.cluster).astype("int32")
        block = stack.enter_context(T.launch_thread("blockIdx.x", blocks))
        thread = stack.enter_context(T.launch_thread("threadIdx.x", tiles.threads))
        _Block(grid, tiles, sums, maps, (block, thread), clusters).emit()


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


@dataclass(frozen=True)
class _Turn:
    """A tile, or a part of one, of a block."""

    number: Expr
    """How many the block had before."""
    more: Expr
    """Whether it has another after this one."""
    piece: Piece
    """Of the cluster's tile."""
    m0: Expr
    """The first row of the block's own."""

    @property
    def steps(self) -> Expr:
        return self.piece.steps


class _Block:
    """The code for one thread block."""

    def __init__(
        self,
        grid: Grid,
        tiles: WgmmaMatmulTiles,
        sums: Sums,
        maps: list[_Map],
        place: tuple[Expr, Expr],
        clusters: Expr,
    ) -> None:
        self.grid, self.tiles, self.sums, self.maps = grid, tiles, sums, maps
        block, self.thread = place
        # Of the block in its cluster, and of that; computed anew where they are needed.
        self.rank, self.cluster = tirx.truncmod(block, tiles.cluster), tirx.truncdiv(block, tiles.cluster)
        self.clusters = clusters.astype("int32")
        shape = grid.matmuls.shape
        words = tiles.shared_memory(shape) // 4
        self.memory = shared_memory(words, "uint32", _ALIGNMENT)
        self.barriers = T.alloc_buffer((2 * tiles.stages,), "uint64", scope="shared", align=8)
        warps = tiles.m // ROWS * 4  # that multiply a tile
        self.ring = Ring(self.barriers, 0, tiles.stages, warps, tiles.cluster)
        # Tiles of A, of all stages, then those of B.
        self.starts, at = [], 0
        for each in maps:
            self.starts.append(at)
            at += tiles.stages * each.words
        self.behind = at

    def emit(self) -> None:
        initialize(self.thread, [self.ring])
        together = self.tiles.cluster > 1
        synchronize_cluster() if together else synchronize()
        specialize(self.tiles, self.thread, self.produce, self.consume)
        if together:
            synchronize_cluster()  # the other block may still let go of slots here

    def each_turn(self, body: Callable[[_Turn], None]) -> None:
        selection = self.grid.matmuls.selection
        self.each_tile(body) if selection is None else self.each_run_of_tiles(selection, body)

    def each_run_of_tiles(self, selection: Selection, body: Callable[[_Turn], None]) -> None:
        """For the runs of rows with one matrix in each tile of this block."""
        grid, count, table = self.grid, registers(1, "int32"), self.sums.epilogue.memory[selection.table]
        whole, steps, rows = (let(n.astype("int32")) for n in (grid.whole, grid.steps, grid.rows))
        turns = let(tirx.truncdiv(whole - self.cluster + self.clusters - 1, self.clusters))
        put(count, 0, 0)
        with T.serial(turns) as turn:
            place = grid.place(let(self.cluster + turn * self.clusters))
            behind = let(tirx.min(place.m0 + int32(grid.high), rows))

            def run(start: Expr, end: Expr, number: Expr) -> None:
                of_run = Place(start, place.n0, {selection.group: number})
                piece = Piece(of_run, T.int32(0), steps, T.bool(True), T.int32(0), end)
                more = let(tirx.any(end < behind, turn + 1 < turns))
                body(_Turn(let(count[0]), more, piece, start))
                put(count, 0, count[0] + 1)

            each_run(table, selection, place.m0, behind, run)

    def each_tile(self, body: Callable[[_Turn], None]) -> None:
        """For the whole tiles of this block, every so many, and then for those in its share."""
        grid, clusters = self.grid, let(self.clusters)
        whole, steps = (let(n.astype("int32")) for n in (grid.whole, grid.steps))
        wholes = let(tirx.truncdiv(whole - self.cluster + clusters - 1, clusters))
        share = registers(2, "int32")  # its first step, and the one behind its last
        for n in range(2):
            put(share, n, T.int32(0))
        with T.If(grid.shares > 0), T.Then():
            for n, step in enumerate(grid.share(self.cluster)):
                put(share, n, step)
        first = let(tirx.truncdiv(share[0], steps))
        turns = let(wholes + tirx.truncdiv(share[1] + steps - 1, steps) - first)
        with T.serial(turns) as turn:
            behind = whole + first + (turn - wholes)
            tile = let(tirx.Select(turn < wholes, self.cluster + turn * clusters, behind))
            piece = grid.piece(tile, self.cluster, (share[0], share[1]))
            m0 = let(piece.place.m0 + self.rank * self.tiles.m)
            body(_Turn(turn, turn + 1 < turns, piece, m0))

    def produce(self) -> None:
        """One thread: the tiles of A and B on their way."""
        fills = registers(1, "int32")
        put(fills, 0, 0)
        total = sum(each.words * 4 for each in self.maps)

        def tile(turn: _Turn) -> None:
            m0, n0 = turn.m0, turn.piece.place.n0
            with T.serial(turn.steps) as n:
                fill = let(fills[0] + n)
                self.ring.reserve(fill, total)
                for each, start, outer in zip(self.maps, self.starts, (m0, *(n0 for _ in self.maps))):
                    at = start + self.ring.slot(fill) * each.words
                    k = let((turn.piece.first + n) * self.tiles.k)
                    each.load(self.memory, at, turn.piece.place, (outer, k), self.rank, self.ring.full(fill))
            put(fills, 0, fills[0] + turn.steps)

        self.each_turn(tile)

    def consume(self, w: Expr) -> None:
        """Consumer w: rows [64 w, 64 w + 64) of each tile, or by ping-pong each tile whose turn is w, modulo 2."""
        ping_pong = self.tiles.ping_pong
        lane = let(tirx.truncmod(self.thread, WARP))
        warp = let(tirx.truncmod(tirx.truncdiv(self.thread, WARP), 4))
        a_map, *b_maps = self.maps
        own = T.int32(0) if ping_pong else let(w * (ROWS * ROW_BYTES // 4))
        a_tile = wgmma.descriptor(self.memory, own, self.tiles.m)
        b_tiles = [
            wgmma.descriptor(self.memory, start, b.size if b.along_k else COLUMNS)
            for b, start in zip(b_maps, self.starts[1:])
        ]
        C = [registers(self.grid.each // 2, "float32") for _ in b_maps]
        fills = registers(1, "int32")
        put(fills, 0, 0)

        def multiply(turn: _Turn) -> None:
            for c in C:
                with T.unroll(self.grid.each // 2) as n:
                    put(c, n, T.float32(0))
            for c in C:
                wgmma.fence(c)  # nothing may touch it from here on, until all matmuls are done
            if ping_pong:
                self.take_turn(w, turn)
            with T.serial(turn.steps) as n:
                fill = let(fills[0] + n)
                self.ring.wait(fill)
                slot = self.ring.slot(fill)
                wgmma.begin()
                for c, b, b_tile in zip(C, b_maps, b_tiles):
                    ours = a_tile + (slot * (a_map.words * 4 // wgmma.UNIT)).astype("uint64")
                    theirs = b_tile + (slot * (b.words * 4 // wgmma.UNIT)).astype("uint64")
                    wgmma.add_matmul(self.grid.matmuls.shape.dtype, c, ours, theirs, self.tiles.k, b.along_k)
                wgmma.commit()
                wgmma.wait(1)
                with T.If(n > 0), T.Then():
                    self.ring.release(fill - 1, lane)
            if ping_pong:
                self.give_turn(w, turn)
            wgmma.wait(0, *C)
            with T.If(turn.steps > 0), T.Then():
                self.ring.release(fills[0] + turn.steps - 1, lane)
            self.store(turn, C, (w, warp), lane)

        def tile(turn: _Turn) -> None:
            if ping_pong:
                with T.If(tirx.EQ(tirx.truncmod(turn.number, 2), w)), T.Then():
                    multiply(turn)
            else:
                multiply(turn)
            put(fills, 0, fills[0] + turn.steps)

        self.each_turn(tile)

    # Turns at the tensor cores. Without them results would be wrong, too: a consumer leaves out the other's fills, and
    # by its parity alone a fill cannot be told from the one two rounds of the ring before.

    def take_turn(self, w: Expr, turn: _Turn) -> None:
        with T.If(turn.number > 0), T.Then():
            named_sync(_FIRST_TURN + w, 2 * WARPGROUP)

    def give_turn(self, w: Expr, turn: _Turn) -> None:
        with T.If(turn.more), T.Then():
            named_arrive(_FIRST_TURN + 1 - w, 2 * WARPGROUP)

    def store(self, turn: _Turn, C: list[tirx.Buffer], warp: tuple[Expr, Expr], lane: Expr) -> None:
        """The 16 rows of a warp, that of a number in a consumer, some columns at a time."""
        words = self.tiles.shared_memory(self.grid.matmuls.shape) // 4
        memory = T.decl_buffer((words,), "float32", data=self.memory.data, scope="shared.dyn")
        columns = self.tiles.piece // self.grid.count
        consumer, warp_of_consumer = warp
        of_block = let(consumer * 4 + warp_of_consumer)
        mine = let(self.behind + of_block * (16 * self.sums.pitch(columns)))
        of_tile = warp_of_consumer if self.tiles.ping_pong else of_block
        for first in range(0, self.grid.each, columns):

            def fragment(c: tirx.Buffer, first: int = first) -> Fragment:
                return lambda n, y: c[first // 2 + n * 4 + y]

            rows = (let(turn.m0 + of_tile * 16), let(turn.piece.place.n0 + first), columns)
            self.sums.store(turn.piece, rows, [fragment(c) for c in C], (memory, mine), lane)
