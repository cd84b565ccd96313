"""Store accumulators of matmuls from the registers of warps to the output.

They go through shared memory, and those of partial tiles also through the device's memory. A warp has accumulators of
16 rows as fragments (ptx.py). It writes them to shared memory, from where its threads read whole chunks of a row
(epilogue.py).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..elementwise.chunks import load_vector, store_values
from ..primitives import ptx
from ..primitives.host import bind_on_host
from ..primitives.ptx import WARP, alloc_registers, int32, let, store_element, unrolled
from ..primitives.threads import ThreadTiles, launch_threads
from .epilogue import Accumulator, Epilogue, index_accumulators
from .matmul_grid import Grid, WorkUnit

PAD = 8  # floats after a row in shared memory, by which the columns of a fragment access each bank once

AccumulatorFragment = Callable[[Expr, int], Expr]
"""The accumulator at (n, y): register y of the n-th eight columns of 16 rows."""


class AccumulatorStore:
    """Stores accumulators. `partial` has those of partial tiles: [slots, matmuls, rows, columns].

    Along the steps of all tiles, the next part is in the next share or of the next tile, so the slot of a part is the
    sum of both numbers.
    """

    def __init__(self, grid: Grid, epilogue: Epilogue) -> None:
        self.grid, self.epilogue = grid, epilogue
        slots = grid.shares + grid.shared_tiles - 1
        size = tirx.Select(
            grid.shares > 0, slots * (grid.count * grid.rows_per_tile * grid.columns_per_matmul), T.int64(1)
        )
        self.partial = T.alloc_buffer((size,), "float32")

    def pitch(self, columns: int) -> int:
        """Return the floats of a row in shared memory with so many columns of each matmul."""
        return self.grid.count * columns + PAD

    def store_fragments(
        self,
        unit: WorkUnit,
        rows: tuple[Expr, Expr, int],
        fragments: list[AccumulatorFragment],
        memory: tuple[tirx.Buffer, Expr],
        lane: Expr,
    ) -> None:
        """Store 16 rows by some columns of each matmul, by a warp.

        `rows` is the first row, the first column and the number of columns; `memory` is the warp's shared memory and
        offset.
        """
        width, (row0, column0, columns), (shared, warp_offset) = self.epilogue.width, rows, memory
        pitch, across = self.pitch(columns), columns // width
        for p, fragment in enumerate(fragments):
            thread_offset = let(warp_offset + tirx.truncdiv(lane, 4) * pitch + tirx.truncmod(lane, 4) * 2 + p * columns)
            with unrolled(columns // 8) as n:
                for y in range(4):
                    store_element(shared, thread_offset + n * 8 + (y // 2 * 8 * pitch + y % 2), fragment(n, y))
        ptx.synchronize_warp()
        all_columns = int32(self.grid.columns)
        with T.serial(16 * across // WARP) as n:
            chunk = let(n * WARP + lane)
            r, c = let(tirx.truncdiv(chunk, across)), let(tirx.truncmod(chunk, across) * width)
            row, column = let(row0 + r), let(column0 + c)
            with T.If(tirx.all(row < unit.end, column < all_columns)), T.Then():
                chunk_offset = let(warp_offset + r * pitch + c)
                accumulators = [index_accumulators(shared, chunk_offset + p * columns) for p in range(self.grid.count)]
                with T.If(unit.is_whole):
                    with T.Then():
                        self.epilogue.store_columns(unit.position.batch_indices, row, column, accumulators)
                    with T.Else():
                        self.store_partial(unit, (row, column), accumulators)
        ptx.synchronize_warp()

    def store_partial(self, unit: WorkUnit, cell: tuple[Expr, Expr], accumulators: list[Accumulator]) -> None:
        slot, row = unit.slot.astype("int64"), cell[0] - unit.position.m0
        for p, accumulator in enumerate(accumulators):
            chunk = alloc_registers(self.epilogue.width, "float32")
            with unrolled(self.epilogue.width) as x:
                store_element(chunk, x, accumulator(x))
            store_values(self.partial, let(self.row_offset(slot, p, row) + (cell[1] - unit.position.n0)), chunk)

    def row_offset(self, slot: Expr, matmul: int, row: Expr) -> Expr:
        """Return the offset of a row of a slot."""
        return ((slot * self.grid.count + matmul) * self.grid.rows_per_tile + row) * self.grid.columns_per_matmul

    def add_partials(self) -> None:
        """Launch the addition of partial tiles, with a thread for `width` columns of a row."""
        grid, width = self.grid, self.epilogue.width
        across = grid.columns_per_matmul // width
        chunks_per_tile = grid.rows_per_tile * across
        with launch_threads(bind_on_host(grid.shared_tiles * chunks_per_tile), ThreadTiles()) as number:
            shared_index, chunk = (
                let(tirx.truncdiv(number, chunks_per_tile)),
                let(tirx.truncmod(number, chunks_per_tile)),
            )
            position = grid.locate_tile(let((grid.whole_tiles + shared_index).astype("int32")))
            r, c = let(tirx.truncdiv(chunk, across)), let(tirx.truncmod(chunk, across) * width)
            row, column = let(position.m0 + r), let(position.n0 + c)
            first, last = grid.find_tile_shares(shared_index)
            with T.If(tirx.all(first < last, row < grid.rows, column < grid.columns)), T.Then():
                totals = alloc_registers(grid.count * width, "float32")
                with unrolled(grid.count * width) as n:
                    store_element(totals, n, T.float32(0))
                with T.serial((last - first + 1).astype("int32")) as index:
                    for p in range(grid.count):
                        partial_offset = let(self.row_offset(first + index + shared_index, p, r) + c)
                        addends = alloc_registers(width, "float32")
                        load_vector(addends, 0, self.partial, partial_offset, width)
                        with unrolled(width) as x:
                            store_element(totals, p * width + x, totals[p * width + x] + addends[x])
                accumulators = [index_accumulators(totals, p * width) for p in range(grid.count)]
                self.epilogue.store_columns(position.batch_indices, row, column, accumulators)
