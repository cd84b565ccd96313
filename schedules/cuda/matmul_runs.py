"""Rows that choose their matrix by a table, many of them: runs of successive rows with one matrix go together.

    for each 16 columns of C and `tiles.rows` successive rows, a block      blocks of the same columns side by side
        for each run of rows with one matrix                                 at most as long as the block is high
            the sums of matmul_rows.py, for rows from the first of the run on

A matrix is read once for each block that has rows of it. Few rows are a batch: each has blocks of its own
(matmul_rows.py).
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..reading.selection import Selection
from . import ptx
from .device import Device
from .epilogue import Ends
from .host import on_host
from .matmul_grid import Place
from .matmul_rows import COLUMNS, Columns, Group
from .matmul_tiles import FewRowsTiles
from .pieces import Ring
from .ptx import WARP, fixed, put, registers

BATCHED = 64
"""Up to so many rows are a batch: a block for each has more of memory on its way."""


def matmul_runs(group: Group, selection: Selection, tiles: FewRowsTiles, device: Device, ends: Ends) -> None:
    """Emit the kernel and its launch into the function that is open.

    Args:
        group: Products of the rows of one matrix, whose number is `selection.group`, with A and their Bs.
        selection: The table of matrices, a parameter of the function.
        tiles: Of a block.
        device: The GPU.
        ends: What becomes of results.
    """
    products = group[0]
    epilogue = ends.epilogue(products)
    rows, columns = on_host(products.rows), on_host(products.columns)
    high = on_host(tirx.ceildiv(rows, T.int64(tiles.rows)))
    blocks = on_host(high * tirx.ceildiv(columns, T.int64(COLUMNS)))
    with (
        T.If(blocks > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
    ):
        ring = Ring(thread, tiles.threads, tiles.shared_memory(products.shape), 0)
        if device.begins_early:
            ptx.wait_for_earlier_kernels()
        count, last = fixed(high.astype("int32")), fixed(rows.astype("int32") - 1)
        first, n0 = fixed(block % count * tiles.rows), fixed(epilogue.first(block // count))
        table = epilogue.memory[selection.table]
        begin = registers(1, "int32")
        put(begin, 0, first)
        with T.serial(tiles.rows) as i:
            row = fixed(first + i)
            at, following = (fixed(tirx.min(n, last).astype("int64")) for n in (row, row + 1))
            is_last = tirx.any(tirx.EQ(i, tiles.rows - 1), tirx.EQ(row, last), table[at] != table[following])
            with T.If(tirx.all(row <= last, is_last)), T.Then():
                m0 = fixed(begin[0])
                ring.taken = 0
                place = Place(m0, n0, {selection.group: fixed(table[at])})
                Columns(group, tiles, epilogue, place, ring, False, None).emit(row + 1 - m0, columns)
                put(begin, 0, row + 1)
                ptx.synchronise()  # the ring is free for the next run
