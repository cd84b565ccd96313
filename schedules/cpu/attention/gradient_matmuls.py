"""The two matmuls of tiles that gradients of attention consist of, in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ..primitives.vector import Buffer, Register, let, load, splat, splat_like, store
from .gradient_tiles import GradientTiles

Operand = Callable[[str, int, Expr, Expr, int], Expr]
"""Load elements [d, d + w) of an operand's row, given its name, the size of its rows, the row, d and w."""


class TileMatmuls:
    """Matmuls of operands and tiles in the type acc, with vectors of W lanes."""

    def __init__(self, tiles: GradientTiles, W: int, acc: str, operand: Operand) -> None:
        self.tiles, self.W, self.acc, self.operand = tiles, W, acc, operand
        self.panel = tiles.qk_vectors * W

    def transposed(
        self, name: str, size: int, panels: Buffer, rows: Sequence[Expr], panel: Expr
    ) -> list[list[Register]]:
        """Multiply rows of an operand by a panel of a transposed operand, [panel][element][column].

        Return the accumulators by row and vector of columns.
        """
        t, W = self.tiles, self.W
        accumulators = [[Register(splat(0.0, W, self.acc)) for _ in range(t.qk_vectors)] for _ in rows]
        with T.serial(size) as d:
            columns = [T.bind(load(panels, W, (panel * size + d) * self.panel + c * W)) for c in range(t.qk_vectors)]
            for n, row in enumerate(rows):
                element = T.bind(splat(self.operand(name, size, row, d, 1), W, self.acc))
                for c in range(t.qk_vectors):
                    accumulators[n][c].value += element * columns[c]
        return accumulators

    def add(
        self,
        weights: tuple[Buffer, int, int],
        operand: tuple[str, int],
        result: Buffer,
        origin: tuple[Expr, Expr, Expr] | None,
        sizes: tuple[Expr, Expr],
        leave_out: bool,
        scale: Expr | None = None,
    ) -> None:
        """Emit result[m] += scale * sum over n of weight(m, n) * operand[n], for `sizes` (m, n).

        weights are a tile and its strides along m and n; operand is a name and the size of its rows. Rows of the result
        are rows from `origin` on of a tensor [b, h, row, d], or without origin those of a tile. leave_out skips terms
        with weight 0, whatever the operand holds.
        """
        t, (tile, m_stride, n_stride), (name, size), (rows, count) = self.tiles, weights, operand, sizes
        w = whole_vectors(size, self.W)
        vectors = size // w
        groups = -(-vectors // t.pv_vectors)

        def at(row: Expr, d: int) -> list[Expr]:
            return [row * size + d] if origin is None else [*origin[:2], origin[2] + row, T.int64(d)]

        for group in range(groups):
            columns = [n * w for n in range(group * vectors // groups, (group + 1) * vectors // groups)]
            with T.serial(tirx.ceildiv(rows, T.int64(t.pv_rows))) as block:
                # The last block repeats the last row, whose results are the same, and stores them again.
                m = [let(tirx.min(block * t.pv_rows + n, rows - 1)) for n in range(t.pv_rows)]
                accumulators = [[Register(splat(0.0, w, self.acc)) for _ in columns] for _ in m]
                with T.serial(count) as n:
                    x = [T.bind(self.operand(name, size, n, T.int64(d), w)) for d in columns]
                    for k, row in enumerate(m):
                        weight = T.bind(splat(tile[row * m_stride + n * n_stride], w, self.acc))
                        for c, register in enumerate(accumulators[k]):
                            new = register.value + weight * x[c]
                            if leave_out:
                                new = tirx.Select(weight == splat_like(0.0, weight), register.value, let(new))
                            register.value = new
                before = [[let(load(result, w, *at(row, d))) for d in columns] for row in m]
                for k, row in enumerate(m):
                    for c, d in enumerate(columns):
                        total = accumulators[k][c].value
                        total = total if scale is None else total * splat_like(scale, total)
                        store(result, before[k][c] + total, *at(row, d))


def whole_vectors(size: int, lanes: int) -> int:
    """Return the number of lanes of vectors that divide a row of `size` elements."""
    return min(lanes, size & -size)
