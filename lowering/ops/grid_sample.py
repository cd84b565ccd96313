"""ONNX GridSample (https://onnx.ai/onnx/operators/onnx__GridSample.html), over any number of spatial axes.

Along each axis a place of the grid weighs a few elements of X: small tables say which and how much, and of a place they
serve all channels, which come last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ..importing.channels import channels_last, channels_second
from ..importing.compute import is_float, widened
from ..importing.node import Node
from ..importing.values import Shape, Size, Value
from ..tensorir.independent import independent
from . import op
from .asserted import asserted, required
from .kernels import compute, let, loops

_CUBIC = -0.75
_UNROLLED = 8  # elements whose sum is written out
_MODES = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}
"""How many elements are weighed along an axis."""
_PADDINGS = ("zeros", "border", "reflection")


@op("GridSample", since=16)
def grid_sample(node: Node, x: Value, grid: Value) -> Value:
    """[N, C, ...] of X [N, C, D1, ...] at the places [N, ..., spatial axes] of the grid, the last axis of X first."""
    mode, padding = node.attr("mode", "linear"), node.attr("padding_mode", "zeros")
    for name, given, legal in (("mode", mode, tuple(_MODES)), ("padding_mode", padding, _PADDINGS)):
        if given not in legal:
            raise node.error(f"attribute {name} is '{given}'.", f"Use one of {', '.join(legal)}.")
    count = _MODES[mode]
    spatial = x.rank - 2
    if spatial < 1 or grid.rank != x.rank or grid.shape[-1] != spatial:
        raise node.error(
            f"inputs X {list(x.shape)} and grid {list(grid.shape)} do not fit.",
            "X is [N, C, D1, ...], and the grid [N, ..., number of D].",
        )
    if not is_float(grid.dtype) or (count > 1 and not is_float(x.dtype)) or count**spatial > 64:
        raise node.error(f"mode '{mode}' of X {x.dtype} with {spatial} spatial axes is not supported.")
    batch, sizes, places = x.shape[0], x.shape[2:], grid.shape[1:-1]
    grid = asserted(node, grid, (batch, *places, spatial))
    for size in sizes:
        x = required(node, x, size > 0, "dimension {} of X is empty.", size)
    acc = "float64" if grid.dtype == "float64" else "float32"
    along = Along(padding, bool(node.attr("align_corners", 0)), count, acc)
    tables: list[Value] = []
    for axis, size in enumerate(sizes):
        tables += along.tables(node, grid, spatial - 1 - axis, size, (batch, *places, count))
    last = channels_last(node, x)
    y = _sums(node, last, tables, (batch, *places, x.shape[1]), count, spatial, padding == "zeros")
    return channels_second(node, y)


@dataclass(frozen=True)
class Along:
    """What is the same along all axes: how places outside are meant, how many elements are weighed, and the type of
    coordinates."""

    padding: str
    corners: bool
    count: int
    acc: str

    def tables(self, node: Node, grid: Value, where: int, size: Size, shape: Shape) -> list[Value]:
        """Of an axis of so many places the elements [N, ..., count] that a place of the grid weighs, -1 for one that is
        0, and their weights if there are several; where is its coordinate in the grid."""

        def statements(grid: Any, *made: Any) -> None:
            wide, half, one = number_of(size, self.acc), tirx.const(0.5, self.acc), tirx.const(1.0, self.acc)
            low, high = (half - half, wide - one) if self.corners else (-half, wide - half)
            with independent(*made[0].shape[:-1]) as index:
                number = grid[(*index, tirx.const(where, "int64"))].astype(self.acc)
                at = (number + one) * half * (wide - one) if self.corners else ((number + one) * wide - one) * half
                at = let(tirx.nearbyint(at) if self.count == 1 else at)
                if self.padding == "border":
                    inside = tirx.max(tirx.min(at, wide - one), half - half)
                    at = let(tirx.Select(tirx.any(at < low, at > high), inside, at))
                elif self.padding == "reflection":
                    at = let(_reflected(at, low, high, self.acc))
                before = let(tirx.floor(at))
                first = let(far_index(before))
                for k in range(self.count):
                    place = (*index, tirx.const(k, "int64"))
                    element = let(first + (k - (1 if self.count == 4 else 0)))
                    T.buffer_store(made[0], self.element(element, size, low, high), list(place))
                    if self.count > 1:
                        T.buffer_store(made[1], _weight(at - before, k, self.count, self.acc), list(place))

        outputs = [(shape, "int64"), *([(shape, self.acc)] if self.count > 1 else [])]
        return list(loops(node, "grid", statements, [grid], outputs, sizes=[size]))

    def element(self, number: Any, size: Size, low: Any, high: Any) -> Any:
        """The element that counts as this one, which may be outside."""
        zero = tirx.const(0, "int64")
        if self.padding == "zeros":
            return tirx.if_then_else(tirx.all(number >= 0, number < size), number, tirx.const(-1, "int64"))
        if self.padding == "reflection":  # neighbors lie outside where the place itself does not
            number = let(far_index(let(_reflected(number.astype(self.acc), low, high, self.acc))))
        return tirx.max(tirx.min(number, size - 1), zero)


def _sums(
    node: Node, x: Value, tables: list[Value], shape: tuple[Any, ...], count: int, spatial: int, zeros: bool
) -> Value:
    """Over the products of the tables' elements."""
    each = 1 if count == 1 else 2
    acc = widened(x.dtype) if is_float(x.dtype) else x.dtype

    def element(index: Any, x: Any, *tables: Any) -> Any:
        def term(ks: Any) -> Any:
            places = [tables[each * axis](*index[:-1], k) for axis, k in enumerate(ks)]
            safe = [tirx.max(place, tirx.const(0, "int64")) for place in places] if zeros else places
            value = x(index[0], *safe, index[-1]).astype(acc)
            if zeros:
                inside = tirx.all(*(place >= 0 for place in places))
                value = tirx.if_then_else(inside, value, tirx.const(0, acc))
            for axis, k in enumerate(ks) if count > 1 else ():
                value = value * tables[each * axis + 1](*index[:-1], k).astype(acc)
            return value

        if count**spatial <= _UNROLLED:
            terms = [
                term([tirx.const(k, "int64") for k in ks]) for ks in itertools.product(range(count), repeat=spatial)
            ]
            return sum(terms[1:], terms[0]).astype(dtype)
        axes = [te.reduce_axis((0, count), name=f"k{axis}") for axis in range(spatial)]
        return te.sum(term([axis.var.astype("int64") for axis in axes]), axis=axes)

    dtype = x.dtype if count**spatial <= _UNROLLED else acc
    y = compute(node, "grid_sample", element, [x, *tables], shape, dtype=dtype)
    return (
        y
        if y.dtype == x.dtype
        else compute(node, "rounded", lambda i, y: y(*i).astype(x.dtype), [y], shape, dtype=x.dtype)
    )


def number_of(size: Any, dtype: str) -> Any:
    return tirx.const(size, dtype) if isinstance(size, int) else size.astype(dtype)


def far_index(value: Any) -> Any:
    """A whole number as an index; what is none is far outside."""
    most = tirx.const(2.0**30, value.ty)
    value = tirx.max(tirx.min(value, most), -most)
    return tirx.Select(tirx.isnan(value), -most, value).astype("int64")


def _reflected(at: Any, low: Any, high: Any, acc: str) -> Any:
    """Thrown back at both ends until it is between them; where they are one place, that."""
    span = high - low
    two = tirx.const(2.0, acc)
    period = tirx.Select(span > tirx.const(0.0, acc), span * two, tirx.const(1.0, acc))
    away = let(at - low)
    away = let(away - tirx.floor(away / period) * period)
    away = tirx.Select(away > span, period - away, away)
    return tirx.Select(span > tirx.const(0.0, acc), low + away, low)


def _weight(fraction: Any, k: int, count: int, acc: str) -> Any:
    """Of the k-th of the elements around a place, so far behind the one before it."""
    one = tirx.const(1.0, acc)
    if count == 2:
        return one - fraction if k == 0 else fraction
    x = let(tirx.abs(fraction - tirx.const(float(k - 1), acc)))
    a = _CUBIC
    near = ((tirx.const(a + 2, acc) * x - tirx.const(a + 3, acc)) * x) * x + one
    far = ((tirx.const(a, acc) * x - tirx.const(5 * a, acc)) * x + tirx.const(8 * a, acc)) * x - tirx.const(4 * a, acc)
    return tirx.Select(x <= one, near, far)
