"""Matmuls of many rows that choose their matrix by a table: runs of successive rows with one matrix are multiplied
together.

    for each 16 columns of C and `tiles.rows` successive rows, a block      blocks of the same columns are neighbors
        for each run of rows with one matrix                                 at most as long as the block's rows
            the accumulators of small_m_matmul.py, for rows from the first of the run on

A matrix is read once for each block that has rows of it. Few rows are a batch: each has blocks of its own
(small_m_matmul.py).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..primitives import ptx
from ..primitives.device import Device
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, let
from .epilogue import EpilogueFactory
from .k_slices import ThreadSlots
from .matmul_grid import TilePosition
from .runs import emit_run_loop
from .small_m_matmul import COLUMNS, MatmulOperands, SmallMBlock
from .small_m_tiles import SmallMTiles

MAX_BATCHED_ROWS = {"rows": 64, "wgmma": 8}
"""Up to so many rows are a batch, by the kernel for more: a block for each row has more memory accesses in flight."""


def matmul_runs(group: MatmulOperands, tiles: SmallMTiles, device: Device, factory: EpilogueFactory) -> None:
    """Emit the kernel and its launch into the function being built.

    Args:
        group: Matmuls of the rows of one matrix, with A and their Bs.
        tiles: Tiles of a block.
        device: The GPU.
        factory: Creates the epilogue.
    """
    matmuls, selection = group[0], group[0].selection
    assert selection is not None
    epilogue = factory.create_epilogue(matmuls)
    rows, columns = bind_on_host(matmuls.rows), bind_on_host(matmuls.columns)
    row_blocks = bind_on_host(tirx.ceildiv(rows, T.int64(tiles.rows)))
    blocks = bind_on_host(row_blocks * tirx.ceildiv(columns, T.int64(COLUMNS)))
    with (
        T.If(blocks > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
    ):
        slots = ThreadSlots(thread, tiles.threads, tiles.shared_memory(matmuls.shape), 0)
        if device.begins_early:
            ptx.wait_for_earlier_kernels()
        count = let(row_blocks.astype("int32"))
        first, n0 = let(block % count * tiles.rows), let(epilogue.first(block // count))

        def run(start: Expr, end: Expr, number: Expr) -> None:
            slots.allocated = 0
            position = TilePosition(start, n0, {selection.group: number})
            SmallMBlock(group, tiles, epilogue, position, slots, False, None).emit(end - start, columns)
            ptx.synchronize()  # the slots are free for the next run

        last_row = let(tirx.min(first + tiles.rows, rows.astype("int32")))
        emit_run_loop(epilogue.memory[selection.table], selection, first, last_row, run)
