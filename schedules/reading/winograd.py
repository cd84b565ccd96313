"""Weights of 3 x 3 convolutions in the form of Winograd's algorithm F(2 x 2, 3 x 3).

A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, section 4.1, with its names. A
tile of 2 x 2 outputs reads a patch d of 4 x 4 inputs. With the weights g of a pair of channels, 3 x 3, it is

    A^T [(G g G^T) * (B^T d B)] A

where * multiplies element by element: 16 multiplications for 4 outputs, not 36. U = G g G^T is computed when the model
is compiled, and stored in panels [panels, 16, C, nr] like those of other weights: point 4 r + s is element r, s of U.

`read_weight` writes the weights themselves as an expression of U, so that the convolution is a matmul like any other,
for which `read_transformed_weights` recognizes the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, loads

from .stages import Axis

WINDOW = 3  # taps of a convolution along an axis
TILE = 2  # outputs of a tile along an axis
PATCH = TILE + WINDOW - 1  # inputs of a tile along an axis
POINTS = PATCH * PATCH  # multiplications of a tile, for each pair of channels


def read_weight(load: Callable[..., Expr], channels: int, nr: int, k: Expr, j: Expr) -> Expr:
    """Return the weight of row k, a tap and a channel, and column j; load(panel, point, channel, column) reads U.

    Along an axis, the taps are U_0, U_1 - U_2 and U_3.
    """
    middle_points = [tirx.const(n, "int64") for n in (1, 2)]
    row, column, channel = k // (WINDOW * channels), k // channels % WINDOW, k % channels

    def read_point(r: Expr, s: Expr) -> Expr:
        return load(j // nr, PATCH * r + s, channel, j % nr)

    def read_column(r: Expr) -> Expr:
        middle = read_point(r, middle_points[0]) - read_point(r, middle_points[1])
        return tirx.Select(column == 1, middle, read_point(r, column + column // 2))

    return tirx.Select(
        row == 1, read_column(middle_points[0]) - read_column(middle_points[1]), read_column(row + row // 2)
    )


@dataclass(frozen=True)
class TransformedWeights:
    """A load of U, its channels C and the columns nr of a panel."""

    load: ir.TensorLoad
    channels: int
    nr: int

    def reads_patches(self, a: ir.TensorLoad, rows: Sequence[Axis], k: Axis) -> bool:
        """Return whether row (n, y, x) of A is the patch of its window, whose stride and dilation are 1."""
        if len(rows) != 3 or len(a.indices) != 4:
            return False
        n, y, x = (axis.var for axis in rows)
        row, column = k.var // (WINDOW * self.channels), k.var // self.channels % WINDOW
        analyzer = _make_analyzer((*rows, k))
        pairs = zip(a.indices, (n, y + row, x + column, k.var % self.channels))
        return all(
            prim.expr_deep_equal(analyzer.simplify(index), analyzer.simplify(expected)) for index, expected in pairs
        )


def read_transformed_weights(expr: Expr, j: Axis, k: Axis) -> TransformedWeights | None:
    """Return the load of U from which `expr` computes the weight of row k and column j, or None."""
    points = loads(expr) if isinstance(expr, tirx.Select) else []
    if not points or not all(load.source.same_as(points[0].source) for load in points) or len(points[0].indices) != 4:
        return None
    source = points[0].source
    _, count, channels, nr = source.shape
    if not all(isinstance(size, tirx.IntImm) for size in (count, channels, nr)) or int(count) != POINTS:
        return None
    expected = read_weight(lambda *index: tirx.BufferLoad(source, list(index)), int(channels), int(nr), k.var, j.var)
    analyzer = _make_analyzer((j, k))
    is_equal = prim.expr_deep_equal(analyzer.simplify(expected), analyzer.simplify(expr))
    return TransformedWeights(points[0], int(channels), int(nr)) if is_equal else None


def _make_analyzer(axes: Sequence[Axis]) -> Analyzer:
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, ir.Range(0, axis.extent))
    return analyzer
