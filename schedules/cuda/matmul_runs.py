"""Rows that choose their matrix by a table, many of them: runs of successive rows with one matrix go together.

    for each 16 columns of C and `tiles.rows` successive rows, a block      blocks of the same columns side by side
        for each run of rows with one matrix                                 at most as long as the block is high
            the sums of small_m_matmul.py, for rows from the first of the run on

A matrix is read once for each block that has rows of it. Few rows are a batch: each has blocks of its own
(small_m_matmul.py).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from . import ptx
from .device import Device
from .epilogue import Ends
from .host import on_host
from .matmul_grid import Place
from .pieces import Ring
from .ptx import WARP, let
from .runs import each_run
from .small_m_matmul import COLUMNS, Columns, Group
from .small_m_tiles import SmallMTiles

BATCHED = {"rows": 64, "wgmma": 8}
"""Up to so many rows are a batch, by the kernel for more: a block for each has more of memory on its way."""


def matmul_runs(group: Group, tiles: SmallMTiles, device: Device, ends: Ends) -> None:
    """Emit the kernel and its launch into the function that is open.

    Args:
        group: Matmuls of the rows of one matrix, with A and their Bs.
        tiles: Of a block.
        device: The GPU.
        ends: What becomes of results.
    """
    matmuls, selection = group[0], group[0].selection
    assert selection is not None
    epilogue = ends.epilogue(matmuls)
    rows, columns = on_host(matmuls.rows), on_host(matmuls.columns)
    high = on_host(tirx.ceildiv(rows, T.int64(tiles.rows)))
    blocks = on_host(high * tirx.ceildiv(columns, T.int64(COLUMNS)))
    with (
        T.If(blocks > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
    ):
        ring = Ring(thread, tiles.threads, tiles.shared_memory(matmuls.shape), 0)
        if device.begins_early:
            ptx.wait_for_earlier_kernels()
        count = let(high.astype("int32"))
        first, n0 = let(block % count * tiles.rows), let(epilogue.first(block // count))

        def run(start: Expr, end: Expr, number: Expr) -> None:
            ring.taken = 0
            place = Place(start, n0, {selection.group: number})
            Columns(group, tiles, epilogue, place, ring, False, None).emit(end - start, columns)
            ptx.synchronize()  # the ring is free for the next run

        behind = let(tirx.min(first + tiles.rows, rows.astype("int32")))
        each_run(epilogue.memory[selection.table], selection, first, behind, run)
