"""Sums of matmuls, from the registers of warps to the output: through shared memory, and where they are of a part of a
tile through the device's memory too.

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
from .matmul_grid import Grid, Piece
from .ptx import WARP, int32, let, put, registers, unrolled
from .threads import ThreadTiles, each

PAD = 8  # floats behind a row in shared memory, by which the columns of a fragment meet each bank once

Fragment = Callable[[Expr, int], Expr]
"""The sum at (n, y): register y of the n-th eight columns of 16 rows."""


class Sums:
    """What becomes of sums. `partial` holds those of parts of tiles: [slots, matmuls, rows, columns]. Along the steps
    of all tiles the next part is in the next share or of the next tile: the sum of both numbers is that of its slot."""

    def __init__(self, grid: Grid, epilogue: Epilogue) -> None:
        self.grid, self.epilogue = grid, epilogue
        slots = grid.shares + grid.shared - 1
        size = tirx.Select(grid.shares > 0, slots * (grid.count * grid.high * grid.each), T.int64(1))
        self.partial = T.alloc_buffer((size,), "float32")

    def pitch(self, columns: int) -> int:
        """Floats of a row in shared memory that holds so many columns of each matmul."""
        return self.grid.count * columns + PAD

    def store(
        self,
        piece: Piece,
        rows: tuple[Expr, Expr, int],
        fragments: list[Fragment],
        memory: tuple[tirx.Buffer, Expr],
        lane: Expr,
    ) -> None:
        """16 rows by some columns of each matmul, by a warp. rows: the first row, the first column, so many columns;
        memory: where the warp has room for them."""
        width, (row0, column0, columns), (shared, mine) = self.epilogue.width, rows, memory
        pitch, across = self.pitch(columns), columns // width
        for p, fragment in enumerate(fragments):
            own = let(mine + tirx.truncdiv(lane, 4) * pitch + tirx.truncmod(lane, 4) * 2 + p * columns)
            with unrolled(columns // 8) as n:
                for y in range(4):
                    put(shared, own + n * 8 + (y // 2 * 8 * pitch + y % 2), fragment(n, y))
        ptx.synchronize_warp()
        all_columns = int32(self.grid.columns)
        with T.serial(16 * across // WARP) as n:
            chunk = let(n * WARP + lane)
            r, c = let(tirx.truncdiv(chunk, across)), let(tirx.truncmod(chunk, across) * width)
            row, column = let(row0 + r), let(column0 + c)
            with T.If(tirx.all(row < piece.end, column < all_columns)), T.Then():
                at = let(mine + r * pitch + c)
                sums = [row_of(shared, at + p * columns) for p in range(self.grid.count)]
                with T.If(piece.whole):
                    with T.Then():
                        self.epilogue.store(piece.place.where, row, column, sums)
                    with T.Else():
                        self.keep(piece, (row, column), sums)
        ptx.synchronize_warp()

    def keep(self, piece: Piece, place: tuple[Expr, Expr], sums: list[Sum]) -> None:
        slot, row = piece.slot.astype("int64"), place[0] - piece.place.m0
        for p, of in enumerate(sums):
            ours = registers(self.epilogue.width, "float32")
            with unrolled(self.epilogue.width) as x:
                put(ours, x, of(x))
            store(self.partial, let(self.at(slot, p, row) + (place[1] - piece.place.n0)), ours)

    def at(self, slot: Expr, matmul: int, row: Expr) -> Expr:
        """Where a row of a slot begins."""
        return ((slot * self.grid.count + matmul) * self.grid.high + row) * self.grid.each

    def add_parts(self) -> None:
        """The launch that adds parts of tiles, a thread for `width` columns of a row."""
        grid, width = self.grid, self.epilogue.width
        across = grid.each // width
        of_tile = grid.high * across
        with each(on_host(grid.shared * of_tile), ThreadTiles()) as number:
            among, inside = let(tirx.truncdiv(number, of_tile)), let(tirx.truncmod(number, of_tile))
            place = grid.place(let((grid.whole + among).astype("int32")))
            r, c = let(tirx.truncdiv(inside, across)), let(tirx.truncmod(inside, across) * width)
            row, column = let(place.m0 + r), let(place.n0 + c)
            first, last = grid.shares_of(among)
            with T.If(tirx.all(first < last, row < grid.rows, column < grid.columns)), T.Then():
                sums = registers(grid.count * width, "float32")
                with unrolled(grid.count * width) as n:
                    put(sums, n, T.float32(0))
                with T.serial((last - first + 1).astype("int32")) as part:
                    for p in range(grid.count):
                        at = let(self.at(first + part + among, p, r) + c)
                        ours = registers(width, "float32")
                        load(ours, 0, self.partial, at, width)
                        with unrolled(width) as x:
                            put(sums, p * width + x, sums[p * width + x] + ours[x])
                found = [row_of(sums, p * width) for p in range(grid.count)]
                self.epilogue.store(place.where, row, column, found)
