"""Matmuls on Hopper (sm_90a): TMA, wgmma, and specialized warpgroups for both, as in CUTLASS.

    producer warpgroup                          consumer warpgroups, 64 rows of the tile each
    for each tile of this block                 for each tile of this block
        for each step of 64 values of k             for each step
            A [m, 64], B [n, 64] -> ring                C += A B^T, matmuls of one step issued before the last wait
                                                    C -> epilogue, while the next tile's steps arrive

That is the cooperative schedule. With ping-pong, consumers have alternating tiles of 64 rows of their own, so that the
epilogue of one overlaps the matmuls of the other:

    consumer 0    tile 0: C += A B^T, signal 1     C -> epilogue                      tile 2 ...
    consumer 1                                     tile 1: C += A B^T, signal 0       C -> epilogue

The grid is persistent: it has as many blocks as the GPU has SMs. Two vertically adjacent blocks may be a cluster: each
loads half of a tile of B for both (multicast), so that the second-level cache is read once. A slot of the ring is empty
when the consumers of both have released it. Where tiles of rows are few and odd, there are no clusters, as half of one
would have no rows. Where tiles are few, narrow tiles are used: the host chooses between two launches. Where rows choose
their matrices by a table, a tile is multiplied once for each run of rows with one matrix, from the first row of the run
on, and only the rows of the run are stored: a grouped GEMM. B has rows of k, or is stored as in ONNX, k down and
columns across: wgmma accepts both. Elements outside of the matrices arrive as zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ...reading.selection import Selection
from ..primitives import wgmma
from ..primitives.host import bind_on_host, sm_count
from ..primitives.pipeline import (
    WARPGROUP,
    MbarrierRing,
    initialize_rings,
    named_arrive,
    named_sync,
    specialize_warpgroups,
)
from ..primitives.ptx import (
    WARP,
    alloc_registers,
    alloc_shared_memory,
    int32,
    let,
    store_element,
    synchronize,
    synchronize_cluster,
)
from ..primitives.tma import COLUMNS, ROW_BYTES
from .epilogue import Epilogue
from .matmul_accumulators import AccumulatorFragment, AccumulatorStore
from .matmul_grid import Grid, TilePosition, WorkUnit
from .matmul_reader import Matmuls
from .matmul_tiles import WgmmaMatmulTiles
from .operand_map import OperandMap
from .runs import emit_run_loop
from .tma_operand import TmaOperand

ROWS = 64  # of a consumer
_ALIGNMENT = 1024  # bytes, of swizzled tiles
_FIRST_TURN = 1  # a named barrier; that of the other consumer follows
LONG_RUNS = 96  # rows of a matrix from which on wide tiles are faster; measured on an H200 between 64 and 128
_MANY = 4  # vertically stacked clusters, the last of which may be partly empty


def matmul_wgmma(
    matmuls: Matmuls,
    a: TmaOperand,
    bs: list[TmaOperand],
    tiles: WgmmaMatmulTiles,
    narrow: WgmmaMatmulTiles | None = None,
) -> None:
    """Emit the kernels and their launches into the function being built. A has chunks along k.

    Sizes that are too small for `tiles`, as they leave SMs or half of a cluster idle, get `narrow` tiles, or no
    clusters. So do rows that choose their matrices, where few choose the same one.
    """
    epilogue, facts = Epilogue(matmuls), matmuls.facts
    if matmuls.selection is not None:
        tiles = dataclasses.replace(tiles, cluster=1)  # runs end anywhere: blocks share no rows of one matrix
    m_tiles = tirx.ceildiv(matmuls.rows, tiles.m)
    is_even = tirx.EQ(tirx.floormod(m_tiles, tiles.cluster), tirx.const(0, "int64"))
    is_whole = facts.simplify(tirx.any(is_even, m_tiles >= _MANY * tiles.cluster))
    single = dataclasses.replace(tiles, cluster=1) if narrow is None else narrow

    def emit(tiles: WgmmaMatmulTiles) -> None:
        _emit(matmuls, a, bs, tiles, epilogue)

    if narrow is None and isinstance(is_whole, tirx.IntImm):
        emit(tiles if is_whole.value else single)
        return
    if matmuls.selection is not None:
        is_whole = matmuls.rows >= LONG_RUNS * matmuls.selection.count
    elif narrow is not None:
        columns = tirx.ceildiv(matmuls.columns * len(bs), tiles.n)
        is_whole = tirx.all(is_whole, m_tiles * columns * matmuls.batch >= sm_count())
    with T.If(bind_on_host(is_whole) > 0):
        with T.Then():
            emit(tiles)
        with T.Else():
            emit(single)


def _emit(matmuls: Matmuls, a: TmaOperand, bs: list[TmaOperand], tiles: WgmmaMatmulTiles, epilogue: Epilogue) -> None:
    grid = Grid(matmuls, tiles, tiles.cluster)
    with T.If(grid.blocks > 0), T.Then():
        max_blocks = sm_count() if tiles.blocks is None else T.int64(tiles.blocks)
        clusters = bind_on_host(tirx.max(tirx.truncdiv(max_blocks, tiles.cluster), T.int64(1)))
        grid.distribute(clusters) if matmuls.selection is None else grid.assign_whole_tiles()
        accumulators = AccumulatorStore(grid, epilogue)
        _launch(grid, accumulators, a, bs, tiles, clusters)
        if matmuls.selection is None:
            with T.If(grid.shares > 0), T.Then():
                accumulators.add_partials()


def _launch(
    grid: Grid,
    accumulators: AccumulatorStore,
    a: TmaOperand,
    bs: list[TmaOperand],
    tiles: WgmmaMatmulTiles,
    max_clusters: Expr,
) -> None:
    """Launch blocks in clusters as the tiles specify, with a grid of at most so many clusters."""
    maps = [OperandMap(grid, accumulators.epilogue, a, grid.rows, tiles.m, 1)]
    maps += [
        OperandMap(grid, accumulators.epilogue, b, grid.columns, grid.columns_per_matmul, tiles.cluster) for b in bs
    ]
    clusters = bind_on_host(tirx.min(grid.whole_tiles + grid.shares, max_clusters))
    with ExitStack() as stack:
        if tiles.cluster > 1:
            stack.enter_context(T.launch_thread("clusterCtaIdx.x", tiles.cluster))
        blocks = (clusters * tiles.cluster).astype("int32")
        block = stack.enter_context(T.launch_thread("blockIdx.x", blocks))
        thread = stack.enter_context(T.launch_thread("threadIdx.x", tiles.threads))
        _Block(grid, tiles, accumulators, maps, (block, thread), clusters).emit()


@dataclass(frozen=True)
class _WorkItem:
    """A tile, or a part of one, that a block processes."""

    index: Expr
    """How many items the block processed before."""
    has_next: Expr
    """Whether the block has another item after this one."""
    unit: WorkUnit
    """The cluster's work on the tile."""
    m0: Expr
    """The first row of this block."""

    @property
    def steps(self) -> Expr:
        return self.unit.steps


class _Block:
    """The code of one thread block."""

    def __init__(
        self,
        grid: Grid,
        tiles: WgmmaMatmulTiles,
        accumulators: AccumulatorStore,
        maps: list[OperandMap],
        position: tuple[Expr, Expr],
        clusters: Expr,
    ) -> None:
        self.grid, self.tiles, self.accumulators, self.maps = grid, tiles, accumulators, maps
        block, self.thread = position
        # Rank of the block in its cluster, and index of the cluster, recomputed where they are needed.
        self.rank, self.cluster = tirx.truncmod(block, tiles.cluster), tirx.truncdiv(block, tiles.cluster)
        self.clusters = clusters.astype("int32")
        shape = grid.matmuls.shape
        word_count = tiles.shared_memory(shape) // 4
        self.memory = alloc_shared_memory(word_count, "uint32", _ALIGNMENT)
        self.barriers = T.alloc_buffer((2 * tiles.stages,), "uint64", scope="shared", align=8)
        warps = tiles.m // ROWS * 4  # that multiply a tile
        self.ring = MbarrierRing(self.barriers, 0, tiles.stages, warps, tiles.cluster)
        # Tiles of A of all stages, then those of B.
        self.starts, at = [], 0
        for operand_map in maps:
            self.starts.append(at)
            at += tiles.stages * operand_map.word_count
        self.store_start = at

    def emit(self) -> None:
        initialize_rings(self.thread, [self.ring])
        has_cluster = self.tiles.cluster > 1
        synchronize_cluster() if has_cluster else synchronize()
        specialize_warpgroups(self.tiles, self.thread, self.produce, self.consume)
        if has_cluster:
            synchronize_cluster()  # the other block may still release slots here

    def visit_items(self, body: Callable[[_WorkItem], None]) -> None:
        selection = self.grid.matmuls.selection
        self.visit_tiles(body) if selection is None else self.visit_runs(selection, body)

    def visit_runs(self, selection: Selection, body: Callable[[_WorkItem], None]) -> None:
        """Visit the runs of rows with one matrix in each tile of this block."""
        grid, count, table = self.grid, alloc_registers(1, "int32"), self.accumulators.epilogue.memory[selection.table]
        whole_tiles, steps, rows = (let(n.astype("int32")) for n in (grid.whole_tiles, grid.steps, grid.rows))
        iterations = let(tirx.truncdiv(whole_tiles - self.cluster + self.clusters - 1, self.clusters))
        store_element(count, 0, 0)
        with T.serial(iterations) as iteration:
            position = grid.locate_tile(let(self.cluster + iteration * self.clusters))
            end_row = let(tirx.min(position.m0 + int32(grid.rows_per_tile), rows))

            def run(start: Expr, end: Expr, number: Expr) -> None:
                run_position = TilePosition(start, position.n0, {selection.group: number})
                unit = WorkUnit(run_position, T.int32(0), steps, T.bool(True), T.int32(0), end)
                has_next = let(tirx.any(end < end_row, iteration + 1 < iterations))
                body(_WorkItem(let(count[0]), has_next, unit, start))
                store_element(count, 0, count[0] + 1)

            emit_run_loop(table, selection, position.m0, end_row, run)

    def visit_tiles(self, body: Callable[[_WorkItem], None]) -> None:
        """Visit the whole tiles of this block at a fixed stride, and then those in its share."""
        grid, clusters = self.grid, let(self.clusters)
        whole_tiles, steps = (let(n.astype("int32")) for n in (grid.whole_tiles, grid.steps))
        whole_count = let(tirx.truncdiv(whole_tiles - self.cluster + clusters - 1, clusters))
        share = alloc_registers(2, "int32")  # its first step, and the one after its last
        for n in range(2):
            store_element(share, n, T.int32(0))
        with T.If(grid.shares > 0), T.Then():
            for n, step in enumerate(grid.find_share(self.cluster)):
                store_element(share, n, step)
        first = let(tirx.truncdiv(share[0], steps))
        iterations = let(whole_count + tirx.truncdiv(share[1] + steps - 1, steps) - first)
        with T.serial(iterations) as iteration:
            shared_tile = whole_tiles + first + (iteration - whole_count)
            tile = let(tirx.Select(iteration < whole_count, self.cluster + iteration * clusters, shared_tile))
            unit = grid.make_unit(tile, self.cluster, (share[0], share[1]))
            m0 = let(unit.position.m0 + self.rank * self.tiles.m)
            body(_WorkItem(iteration, iteration + 1 < iterations, unit, m0))

    def produce(self) -> None:
        """Load the tiles of A and B, by one thread."""
        fills = alloc_registers(1, "int32")
        store_element(fills, 0, 0)
        total = sum(operand_map.word_count * 4 for operand_map in self.maps)

        def tile(item: _WorkItem) -> None:
            m0, n0 = item.m0, item.unit.position.n0
            with T.serial(item.steps) as n:
                fill = let(fills[0] + n)
                self.ring.reserve(fill, total)
                for operand_map, start, outer in zip(self.maps, self.starts, (m0, *(n0 for _ in self.maps))):
                    at = start + self.ring.slot(fill) * operand_map.word_count
                    k = let((item.unit.first + n) * self.tiles.k)
                    operand_map.load(self.memory, at, item.unit.position, (outer, k), self.rank, self.ring.full(fill))
            store_element(fills, 0, fills[0] + item.steps)

        self.visit_items(tile)

    def consume(self, w: Expr) -> None:
        """Run consumer w: it has rows [64 w, 64 w + 64) of each tile, or with ping-pong each item whose index is w
        modulo 2.
        """
        ping_pong = self.tiles.ping_pong
        lane = let(tirx.truncmod(self.thread, WARP))
        warp = let(tirx.truncmod(tirx.truncdiv(self.thread, WARP), 4))
        a_map, *b_maps = self.maps
        a_offset = T.int32(0) if ping_pong else let(w * (ROWS * ROW_BYTES // 4))
        a_tile = wgmma.encode_descriptor(self.memory, a_offset, self.tiles.m)
        b_tiles = [
            wgmma.encode_descriptor(self.memory, start, b.size if b.along_k else COLUMNS)
            for b, start in zip(b_maps, self.starts[1:])
        ]
        C = [alloc_registers(self.grid.columns_per_matmul // 2, "float32") for _ in b_maps]
        fills = alloc_registers(1, "int32")
        store_element(fills, 0, 0)

        def multiply(item: _WorkItem) -> None:
            for c in C:
                with T.unroll(self.grid.columns_per_matmul // 2) as n:
                    store_element(c, n, T.float32(0))
            for c in C:
                wgmma.fence_registers(c)  # nothing may access it from here on, until all matmuls are done
            if ping_pong:
                self.wait_for_turn(w, item)
            with T.serial(item.steps) as n:
                fill = let(fills[0] + n)
                self.ring.wait(fill)
                slot = self.ring.slot(fill)
                wgmma.begin_matmuls()
                for c, b, b_tile in zip(C, b_maps, b_tiles):
                    a_descriptor = a_tile + (slot * (a_map.word_count * 4 // wgmma.UNIT)).astype("uint64")
                    b_descriptor = b_tile + (slot * (b.word_count * 4 // wgmma.UNIT)).astype("uint64")
                    wgmma.add_matmul(
                        self.grid.matmuls.shape.dtype, c, a_descriptor, b_descriptor, self.tiles.k, b.along_k
                    )
                wgmma.commit_matmuls()
                wgmma.wait_for_matmuls(1)
                with T.If(n > 0), T.Then():
                    self.ring.release(fill - 1, lane)
            if ping_pong:
                self.signal_turn(w, item)
            wgmma.wait_for_matmuls(0, *C)
            with T.If(item.steps > 0), T.Then():
                self.ring.release(fills[0] + item.steps - 1, lane)
            self.store_item(item, C, (w, warp), lane)

        def tile(item: _WorkItem) -> None:
            if ping_pong:
                with T.If(tirx.EQ(tirx.truncmod(item.index, 2), w)), T.Then():
                    multiply(item)
            else:
                multiply(item)
            store_element(fills, 0, fills[0] + item.steps)

        self.visit_items(tile)

    # Order at the tensor cores. Without it, results would be wrong, too: a consumer skips the fills of the other, and
    # the parity alone does not distinguish a fill from the one two rounds of the ring before.

    def wait_for_turn(self, w: Expr, item: _WorkItem) -> None:
        with T.If(item.index > 0), T.Then():
            named_sync(_FIRST_TURN + w, 2 * WARPGROUP)

    def signal_turn(self, w: Expr, item: _WorkItem) -> None:
        with T.If(item.has_next), T.Then():
            named_arrive(_FIRST_TURN + 1 - w, 2 * WARPGROUP)

    def store_item(self, item: _WorkItem, C: list[tirx.Buffer], warp: tuple[Expr, Expr], lane: Expr) -> None:
        """Store the 16 rows of a warp, some columns at a time.

        `warp` is the consumer and the index of the warp in it.
        """
        word_count = self.tiles.shared_memory(self.grid.matmuls.shape) // 4
        memory = T.decl_buffer((word_count,), "float32", data=self.memory.data, scope="shared.dyn")
        columns = self.tiles.store_columns // self.grid.count
        consumer, warp_of_consumer = warp
        block_warp = let(consumer * 4 + warp_of_consumer)
        warp_offset = let(self.store_start + block_warp * (16 * self.accumulators.pitch(columns)))
        tile_warp = warp_of_consumer if self.tiles.ping_pong else block_warp
        for first in range(0, self.grid.columns_per_matmul, columns):

            def fragment(c: tirx.Buffer, first: int = first) -> AccumulatorFragment:
                return lambda n, y: c[first // 2 + n * 4 + y]

            rows = (let(item.m0 + tile_warp * 16), let(item.unit.position.n0 + first), columns)
            self.accumulators.store_fragments(item.unit, rows, [fragment(c) for c in C], (memory, warp_offset), lane)
