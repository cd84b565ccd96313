"""Products with few rows, which take as long as B takes to be read: decoding.

B lies in rows of k, one for each column of C, and is what mma.sync calls A: 16 of its rows by 16 values of k, times 8
rows of x, the other operand. k is summed in whatever order, so that a thread asks for 16 bytes at a time: of row g of B
it has k = 8 t to 8 t + 7 of each piece of 32, which are the operands of two products. In float32 these numbers are half
as large. B goes from memory to registers, as nobody else wants it. Of a matrix of codes 16 bytes are c = 2 or 4 times
as many k, which are expanded there.

    for each 16 columns of C, a block                              warps share k: pieces of 32 c, `ahead` / c at once
        sums [16, rows] += B [16, 32 c] x [rows, 32 c]^T           2 c products for each 8 rows
        the sums of the warps meet in shared memory -> epilogue.py
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from lowering.tensorir.expressions import Expr

from ..reading.stages import unravel
from . import ptx
from .epilogue import Epilogue, row_of
from .host import on_host
from .matmul_tiles import FewRowsTiles
from .pieces import Pieces, chunks_at_once
from .products import Operand, Order, Products
from .ptx import WARP, fixed, put, registers, unrolled
from .shared_tile import CHUNK

COLUMNS, PIECE = 16, 4  # rows of B, and chunks of k that a warp has of each


def takes(a: Operand, bs: list[Operand]) -> bool:
    """Whether all operands lie in chunks along k, for all sizes, and as many k of each B in whole 16 bytes."""
    along_k = all(operand.order is Order.K and operand.condition is None for operand in (a, *bs))
    pieces = {chunks_at_once(b.codes) for b in bs}
    whole = all(b.codes is None or b.codes.depth % (chunks_at_once(b.codes) * CHUNK) == 0 for b in bs)
    return along_k and len(pieces) == 1 and whole


def matmul_rows(products: Products, a: Operand, bs: list[Operand], tiles: FewRowsTiles) -> None:
    """Emits the kernel and its launch, for at most `tiles.rows` rows, into the function that is open."""
    epilogue = Epilogue(products)
    rows, columns = on_host(products.rows), on_host(products.columns)
    groups = on_host(tirx.ceildiv(columns, COLUMNS))
    blocks = on_host(groups * products.batch)
    with (
        T.If(blocks * rows > 0),
        T.Then(),
        T.launch_thread("blockIdx.x", blocks.astype("int32")) as block,
        T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
    ):
        place = (fixed(block // groups.astype("int32")), fixed(block % groups.astype("int32") * COLUMNS))
        _Columns(products, (a, bs), tiles, epilogue, place, thread).emit(rows, columns)


class _Columns:
    """The code of one block: 16 columns of each product, all rows."""

    def __init__(
        self,
        products: Products,
        operands: tuple[Operand, list[Operand]],
        tiles: FewRowsTiles,
        epilogue: Epilogue,
        place: tuple[Expr, Expr],
        thread: Expr,
    ) -> None:
        self.products, self.tiles, self.epilogue, self.thread = products, tiles, epilogue, thread
        self.a, self.bs = operands
        batch, self.n0 = place
        axes = products.batch_axes
        self.where = {axis.var: fixed(i) for axis, i in zip(axes, unravel(batch.astype("int64"), axes))}
        self.lane, self.warp = fixed(thread % WARP), fixed(thread // WARP)
        self.g, self.t = fixed(self.lane // 4), fixed(self.lane % 4)
        self.type, self.blocks = products.shape.type, tiles.rows // 8
        self.sums = [registers(self.blocks * 4, "float32") for _ in self.bs]

    def emit(self, rows: Expr, columns: Expr) -> None:
        rows, columns = fixed(rows.astype("int32")), fixed(columns.astype("int32"))
        depth = fixed(self.products.depth.astype("int32"))
        c = chunks_at_once(self.bs[0].codes)
        ahead = max(self.tiles.ahead // c, 1)

        def pieces_of(operand: Operand, outer: Expr, extent: Expr) -> Pieces:
            outer = fixed(outer)
            return Pieces(operand, self.type, self.epilogue.memory, self.where, outer, outer < extent, ahead, c)

        ours = [[pieces_of(b, self.n0 + self.g + r * 8, columns) for r in range(2)] for b in self.bs]
        theirs = [pieces_of(self.a, self.g + r * 8, rows) for r in range(self.blocks)]
        for sums in self.sums:
            with unrolled(self.blocks * 4) as n:
                put(sums, n, T.float32(0))
        chunk = self.type.chunk
        stride = self.tiles.warps * ahead * c * PIECE * chunk
        with T.serial((depth + stride - 1) // stride) as turn:
            for piece in range(ahead):
                first = turn * stride + (self.warp * ahead + piece) * (c * PIECE * chunk)
                k = fixed(first + self.t * (c * chunk))
                for pieces in (*(pieces for pair in ours for pieces in pair), *theirs):
                    pieces.fetch(piece, k, k < depth)
            for piece in range(ahead):
                for n in range(c):
                    x = [pieces.chunk(piece, n) for pieces in theirs]
                    for sums, pair in zip(self.sums, ours):
                        low, high = (pieces.chunk(piece, n) for pieces in pair)
                        for half in (0, 2):
                            b = [[x[half + n] for n in range(2) for x in both] for both in zip(low, high)]
                            for r in range(self.blocks):
                                into = [sums[r * 4 + y] for y in range(4)]
                                self.type.multiply_add(into, b, [part[half : half + 2] for part in x[r]])
        self.finish(rows, columns)

    def finish(self, rows: Expr, columns: Expr) -> None:
        """What the warps summed up, added and stored: rows of the sums are columns of C."""
        count, most = len(self.bs), self.tiles.rows
        size = count * most * COLUMNS  # of a warp
        memory = T.alloc_buffer((self.tiles.warps * size,), "float32", scope="shared", align=16)
        for p, sums in enumerate(self.sums):
            for r in range(self.blocks):
                for y in range(4):
                    row, column = self.t * 2 + y % 2 + r * 8, self.g + y // 2 * 8
                    at = self.warp * size + (p * most + row) * COLUMNS + column
                    put(memory, at, sums[r * 4 + y])
        ptx.synchronise()
        width = self.epilogue.width
        across, threads = COLUMNS // width, self.tiles.warps * WARP
        with T.serial(-(-most * across // threads)) as turn:
            chunk = fixed(turn * threads + self.thread)
            row, c = fixed(chunk // across), fixed(chunk % across * width)
            with T.If(tirx.all(row < rows, row < most, self.n0 + c < columns)), T.Then():
                total = registers(count * width, "float32")
                with unrolled(count * width) as n:
                    put(total, n, T.float32(0))
                with T.serial(self.tiles.warps) as warp:
                    for p in range(count):
                        at = fixed(warp * size + (p * most + row) * COLUMNS + c)
                        with unrolled(width) as x:
                            put(total, p * width + x, total[p * width + x] + memory[at + x])
                found = [row_of(total, p * width) for p in range(count)]
                self.epilogue.store(self.where, row, fixed(self.n0 + c), found)
