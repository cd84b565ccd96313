"""ONNX GridSample (https://onnx.ai/onnx/operators/onnx__GridSample.html), over any number of spatial axes.

Along each axis a grid position weights a few elements of X. Small tables give their indices and weights. The entries of
a position serve all channels, which come last.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.assertions import assert_shape, require
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import is_float, widen_dtype
from ..helpers.kernels import compute, emit_loops, let
from ..helpers.requirements import require_choice

_CUBIC = -0.75
_UNROLLED = 8  # elements whose sum is unrolled
_MODES = {"nearest": 1, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}
"""The number of weighted elements along an axis."""
_PADDINGS = ("zeros", "border", "reflection")


@op("GridSample", since=16)
def grid_sample(node: Node, x: Value, grid: Value) -> Value:
    """Emit [N, C, ...] of X [N, C, D1, ...] at the grid positions [N, ..., spatial axes].

    The first grid coordinate is that of the last axis of X.
    """
    mode, padding = node.attr("mode", "linear"), node.attr("padding_mode", "zeros")
    for name, attribute, legal in (("mode", mode, tuple(_MODES)), ("padding_mode", padding, _PADDINGS)):
        require_choice(node, name, attribute, legal, code="grid_sample.attribute_unsupported")
    count = _MODES[mode]
    spatial = x.rank - 2
    if spatial < 1 or grid.rank != x.rank or grid.shape[-1] != spatial:
        raise node.error(
            "grid_sample.shape_unsupported",
            f"inputs X {list(x.shape)} and grid {list(grid.shape)} do not fit together.",
            "Give X the shape [N, C, D1, ...], and the grid the shape [N, ..., number of D].",
        )
    if not is_float(grid.dtype) or (count > 1 and not is_float(x.dtype)) or count**spatial > 64:
        raise node.error(
            "grid_sample.mode_unsupported",
            f"mode '{mode}' of X {x.dtype} with {spatial} spatial axes is not supported.",
        )
    batch, sizes, grid_sizes = x.shape[0], x.shape[2:], grid.shape[1:-1]
    grid = assert_shape(node, grid, (batch, *grid_sizes, spatial))
    for size in sizes:
        x = require(
            node, x, size > 0, "grid_sample.input_empty", "a spatial dimension of X is {}, and must be positive.", size
        )
    acc = "float64" if grid.dtype == "float64" else "float32"
    grid_axes = GridAxes(padding, bool(node.attr("align_corners", 0)), count, acc)
    tables: list[Value] = []
    for axis, size in enumerate(sizes):
        tables += grid_axes.tables(node, grid, spatial - 1 - axis, size, (batch, *grid_sizes, count))
    last = channels_last(node, x)
    y = _emit_samples(node, last, tables, (batch, *grid_sizes, x.shape[1]), count, spatial, padding == "zeros")
    return channels_second(node, y)


@dataclass(frozen=True)
class GridAxes:
    """Attributes that are equal along all axes.

    They are the padding mode, the alignment of corners, the number of weighted elements, and the type of coordinates.
    """

    padding: str
    corners: bool
    count: int
    acc: str

    def tables(self, node: Node, grid: Value, coordinate: int, size: Size, shape: Shape) -> list[Value]:
        """Emit the elements [N, ..., count] of an axis that a grid position weights, and the weights.

        An element of -1 is 0. Weights exist if there are several elements. where is the coordinate of the axis in the
        grid.
        """

        def statements(grid: Any, *buffers: Any) -> None:
            wide, half, one = cast_size(size, self.acc), tirx.const(0.5, self.acc), tirx.const(1.0, self.acc)
            low, high = (half - half, wide - one) if self.corners else (-half, wide - half)
            with independent_loops(*buffers[0].shape[:-1]) as index:
                number = grid[(*index, tirx.const(coordinate, "int64"))].astype(self.acc)
                position = (
                    (number + one) * half * (wide - one) if self.corners else ((number + one) * wide - one) * half
                )
                position = let(tirx.nearbyint(position) if self.count == 1 else position)
                if self.padding == "border":
                    inside = tirx.max(tirx.min(position, wide - one), half - half)
                    position = let(tirx.Select(tirx.any(position < low, position > high), inside, position))
                elif self.padding == "reflection":
                    position = let(_reflect(position, low, high, self.acc))
                before = let(tirx.floor(position))
                first = let(to_clamped_index(before))
                for k in range(self.count):
                    entry = (*index, tirx.const(k, "int64"))
                    element = let(first + (k - (1 if self.count == 4 else 0)))
                    T.buffer_store(buffers[0], self.element(element, size, low, high), list(entry))
                    if self.count > 1:
                        T.buffer_store(
                            buffers[1], _compute_weight(position - before, k, self.count, self.acc), list(entry)
                        )

        outputs = [(shape, "int64"), *([(shape, self.acc)] if self.count > 1 else [])]
        return list(emit_loops(node, "grid", statements, [grid], outputs, sizes=[size]))

    def element(self, number: Any, size: Size, low: Any, high: Any) -> Any:
        """Return the element that replaces this one, which may be out of bounds."""
        zero = tirx.const(0, "int64")
        if self.padding == "zeros":
            return tirx.if_then_else(tirx.all(number >= 0, number < size), number, tirx.const(-1, "int64"))
        if self.padding == "reflection":  # neighbors can be out of bounds where the position is not
            number = let(to_clamped_index(let(_reflect(number.astype(self.acc), low, high, self.acc))))
        return tirx.max(tirx.min(number, size - 1), zero)


def _emit_samples(
    node: Node, x: Value, tables: list[Value], shape: tuple[Any, ...], count: int, spatial: int, zeros: bool
) -> Value:
    """Accumulate the weighted elements over all combinations of the tables' elements."""
    tables_per_axis = 1 if count == 1 else 2
    acc = widen_dtype(x.dtype) if is_float(x.dtype) else x.dtype

    def element(index: Any, x: Any, *tables: Any) -> Any:
        def term(ks: Any) -> Any:
            position = [tables[tables_per_axis * axis](*index[:-1], k) for axis, k in enumerate(ks)]
            safe = [tirx.max(i, tirx.const(0, "int64")) for i in position] if zeros else position
            value = x(index[0], *safe, index[-1]).astype(acc)
            if zeros:
                is_inside = tirx.all(*(i >= 0 for i in position))
                value = tirx.if_then_else(is_inside, value, tirx.const(0, acc))
            for axis, k in enumerate(ks) if count > 1 else ():
                value = value * tables[tables_per_axis * axis + 1](*index[:-1], k).astype(acc)
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


def cast_size(size: Any, dtype: str) -> Any:
    """Return a size as an expression of that type."""
    return tirx.const(size, dtype) if isinstance(size, int) else size.astype(dtype)


def to_clamped_index(value: Any) -> Any:
    """Return a whole number as an index; a number that is not finite is far out of bounds."""
    limit = tirx.const(2.0**30, value.ty)
    value = tirx.max(tirx.min(value, limit), -limit)
    return tirx.Select(tirx.isnan(value), -limit, value).astype("int64")


def _reflect(position: Any, low: Any, high: Any, acc: str) -> Any:
    """Reflect a position at both ends until it is between them; where the ends coincide, return that position."""
    span = high - low
    two = tirx.const(2.0, acc)
    period = tirx.Select(span > tirx.const(0.0, acc), span * two, tirx.const(1.0, acc))
    distance = let(position - low)
    distance = let(distance - tirx.floor(distance / period) * period)
    distance = tirx.Select(distance > span, period - distance, distance)
    return tirx.Select(span > tirx.const(0.0, acc), low + distance, low)


def _compute_weight(fraction: Any, k: int, count: int, acc: str) -> Any:
    """Return the weight of the k-th element around a position.

    fraction is the distance of the position from the element before it.
    """
    one = tirx.const(1.0, acc)
    if count == 2:
        return one - fraction if k == 0 else fraction
    x = let(tirx.abs(fraction - tirx.const(float(k - 1), acc)))
    a = _CUBIC
    near = ((tirx.const(a + 2, acc) * x - tirx.const(a + 3, acc)) * x) * x + one
    far = ((tirx.const(a, acc) * x - tirx.const(5 * a, acc)) * x + tirx.const(8 * a, acc)) * x - tirx.const(4 * a, acc)
    return tirx.Select(x <= one, near, far)
