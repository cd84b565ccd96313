"""Sums of products, from the registers of warps to the output: through shared memory, and where k was in parts through
the device's memory too.

A warp has sums of 16 rows as fragments (ptx.py): they go to shared memory, from where its threads take whole chunks of
a row (epilogue.py).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from . import ptx
from .chunks import load, store
from .epilogue import Epilogue, Sum, row_of
from .host import on_host
from .matmul_grid import Grid, Place, Where
from .ptx import WARP, fixed, put, registers, unrolled
from .threads import ThreadTiles, each

PAD = 8  # floats behind a row in shared memory, by which the columns of a fragment meet each bank once

Fragment = Callable[[Expr, int], Expr]
"""The sum at (n, y): register y of the n-th eight columns of 16 rows."""


class Sums:
    """What becomes of sums. `partial` holds those of parts of k: [parts, products, batch, rows, columns]."""

    def __init__(self, grid: Grid, epilogue: Epilogue) -> None:
        self.grid, self.epilogue = grid, epilogue
        elements = grid.batch * grid.rows * grid.columns * grid.count
        size = tirx.Select(grid.parts > 1, grid.parts * elements, T.int64(1))
        self.partial = T.alloc_buffer((size,), "float32")

    def pitch(self, columns: int) -> int:
        """Floats of a row in shared memory that holds so many columns of each product."""
        return self.grid.count * columns + PAD

    def store(
        self,
        place: Place,
        part: Expr,
        rows: tuple[Expr, Expr, int],
        fragments: list[Fragment],
        memory: tuple[tirx.Buffer, Expr],
        lane: Expr,
    ) -> None:
        """16 rows by some columns of each product, by a warp. rows: the first row, the first column, so many columns;
        memory: where the warp has room for them."""
        width, (row0, column0, columns), (shared, mine) = self.epilogue.width, rows, memory
        pitch, across = self.pitch(columns), columns // width
        for p, fragment in enumerate(fragments):
            own = fixed(mine + tirx.truncdiv(lane, 4) * pitch + tirx.truncmod(lane, 4) * 2 + p * columns)
            with unrolled(columns // 8) as n:
                for y in range(4):
                    put(shared, own + n * 8 + (y // 2 * 8 * pitch + y % 2), fragment(n, y))
        ptx.synchronise_warp()
        all_rows, all_columns = (size.astype("int32") for size in (self.grid.rows, self.grid.columns))
        with T.serial(16 * across // WARP) as n:
            chunk = fixed(n * WARP + lane)
            r, c = fixed(tirx.truncdiv(chunk, across)), fixed(tirx.truncmod(chunk, across) * width)
            row, column = fixed(row0 + r), fixed(column0 + c)
            with T.If(tirx.all(row < all_rows, column < all_columns)), T.Then():
                at = fixed(mine + r * pitch + c)
                sums = [row_of(shared, at + p * columns) for p in range(self.grid.count)]
                with T.If(self.grid.parts == 1):
                    with T.Then():
                        self.epilogue.store(place.where, row, column, sums)
                    with T.Else():
                        self.keep(place.where, part, (row, column), sums)
        ptx.synchronise_warp()

    def keep(self, where: Where, part: Expr, place: tuple[Expr, Expr], sums: list[Sum]) -> None:
        batch: Expr = T.int64(0)
        for axis in self.grid.products.batch_axes:
            batch = batch * axis.extent + where[axis.var]
        row, column = (n.astype("int64") for n in place)
        for p, of in enumerate(sums):
            ours = registers(self.epilogue.width, "float32")
            with unrolled(self.epilogue.width) as x:
                put(ours, x, of(x))
            store(self.partial, fixed(self.place(part.astype("int64"), p, batch, row) + column), ours)

    def place(self, part: Expr, product: int, batch: Expr, row: Expr) -> Expr:
        """Where a row of a part begins."""
        g = self.grid
        return (((part * g.count + product) * g.batch + batch) * g.rows + row) * g.columns

    def add_parts(self) -> None:
        """The launch that adds the parts of k, a thread for `width` columns of a row."""
        grid, width = self.grid, self.epilogue.width
        across = on_host(tirx.ceildiv(grid.columns, width))
        total = on_host(grid.batch * grid.rows * across)
        with each(total, ThreadTiles()) as number:
            line = fixed(tirx.truncdiv(number, across))
            column = fixed(tirx.truncmod(number, across) * width)
            batch, row = fixed(tirx.truncdiv(line, grid.rows)), fixed(tirx.truncmod(line, grid.rows))
            sums = registers(grid.count * width, "float32")
            with unrolled(grid.count * width) as n:
                put(sums, n, T.float32(0))
            with T.serial(grid.parts.astype("int32")) as part:
                for p in range(grid.count):
                    at = fixed(self.place(part.astype("int64"), p, batch, row) + column)
                    ours = registers(width, "float32")
                    load(ours, 0, self.partial, at, width)
                    with unrolled(width) as x:
                        put(sums, p * width + x, sums[p * width + x] + ours[x])
            found = [row_of(sums, p * width) for p in range(grid.count)]
            self.epilogue.store(grid.where(batch), row, column, found)
