"""The computation of Resize along one axis: coordinates in X, neighbors and weights.

It is in float64, as in the standard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Size, Value
from ...tensorir.independent_loops import independent_loops
from ..helpers.kernels import emit_loops, let
from ..helpers.run_time import bind_sizes, compute_sizes

_MAX_NEIGHBORS = 2**24  # weighted elements of one position of a result


@dataclass(frozen=True)
class ResizeSettings:
    """The attributes of a node."""

    mode: str
    coordinates: str
    rounding: str = "floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


@dataclass(frozen=True, eq=False)
class ResizedAxis:
    """The change of one axis: its size in X, its size in the result, and the scale.

    The scale is a number, None for the ratio of sizes, or a float64 tensor of one element. roi, for tf_crop_and_resize,
    gives the beginning and end of the result in X, relative to its length: a float64 tensor [2].
    """

    axis: int
    in_size: Size
    out_size: Size
    scale: float | Value | None
    roi: Value | None = None

    @property
    def grows(self) -> bool:
        """Return whether the axis grows, or may grow."""
        static_scale = read_static_scale(self)
        return static_scale is None or static_scale >= 1

    def scale_in_kernel(self, buffer: Any) -> Any:
        """Return the scale as an expression of a kernel.

        buffer contains the scale where that is a tensor.
        """
        if isinstance(self.scale, Value):
            return buffer[tirx.const(0, "int64")]
        return to_float64(self.out_size) / to_float64(self.in_size) if self.scale is None else to_float64(self.scale)

    def table(self, node: Node, name: str, body: Callable[..., Any], dtype: str, columns: Size | None = None) -> Value:
        """Emit body(index, parameters) at every position of the result.

        parameters are the run-time numbers of the axis. The table is a separate kernel: TVM does not fuse two functions
        that take the same symbol.
        """
        scale = [self.scale] if isinstance(self.scale, Value) else []
        roi = [] if self.roi is None else [self.roi]
        shape = (self.out_size,) if columns is None else (self.out_size, columns)

        def statements(*buffers: Any) -> None:
            *reads, table = buffers
            zero, unit = (tirx.const(n, "int64") for n in (0, 1))
            ends = (reads[-1][zero], reads[-1][unit]) if roi else (to_float64(0.0), to_float64(1.0))
            parameters = AxisParameters(
                self.in_size, self.out_size, self.scale_in_kernel(reads[0] if scale else None), ends, self.scale is None
            )
            with independent_loops(*table.shape) as index:
                T.buffer_store(table, body(index, parameters), list(index))

        (result,) = emit_loops(
            node, name, statements, [*scale, *roi], [(shape, dtype)], sizes=[self.in_size, self.out_size]
        )
        return result


@dataclass(frozen=True)
class AxisParameters:
    """The sizes of an axis of X and of the result (int64), its scale and roi (float64).

    by_sizes tells whether the scale is the ratio of the sizes.
    """

    in_size: Any
    out_size: Any
    scale: Any
    roi: tuple[Any, Any]
    by_sizes: bool


def read_static_scale(change: ResizedAxis) -> float | None:
    """Return the scale, or None if it is dynamic."""
    if change.scale is None and isinstance(change.in_size, int) and isinstance(change.out_size, int) and change.in_size:
        return change.out_size / change.in_size
    return None if isinstance(change.scale, Value) else change.scale


def to_float64(value: Any) -> Any:
    return tirx.const(float(value), "float64") if isinstance(value, int | float) else value.astype("float64")


def map_coordinate(settings: ResizeSettings, o: Any, parameters: AxisParameters) -> Any:
    """Return the coordinate in X of position o of the result."""
    o, in_size, out_size, scale = (
        to_float64(o),
        to_float64(parameters.in_size),
        to_float64(parameters.out_size),
        parameters.scale,
    )
    zero, half, one = to_float64(0.0), to_float64(0.5), to_float64(1.0)
    length = out_size if parameters.by_sizes else in_size * scale
    rest = length - one  # 0 where the result has one element, at position 0
    safe = tirx.Select(rest == zero, one, rest)
    if settings.coordinates == "align_corners":
        return tirx.Select(rest == zero, zero, o * (in_size - one) / safe)
    if settings.coordinates == "asymmetric":
        return o / scale
    if settings.coordinates == "tf_crop_and_resize":
        first, last = parameters.roi
        span = (last - first) * (in_size - one)
        return tirx.Select(rest == zero, span * half, o * span / safe) + first * (in_size - one)
    center = (o + half) / scale - half
    if settings.coordinates == "pytorch_half_pixel":
        return tirx.Select(rest == zero, -half, center)
    if settings.coordinates == "half_pixel_symmetric":
        return center + in_size * half * (one - out_size / length)
    return center


def clamp_index(index: Any, in_size: Any) -> Any:
    zero = tirx.const(0, "int64")
    return tirx.max(tirx.min(index, in_size - 1), zero)


def to_index(value: Any) -> Any:
    """Return a coordinate as an index; a coordinate far outside every X stays there."""
    limit = to_float64(2.0**40)
    return tirx.max(tirx.min(value, limit), -limit).astype("int64")


def count_neighbors(node: Node, settings: ResizeSettings, change: ResizedAxis) -> tuple[Size, Size]:
    """Return how many elements are weighted, and the offset of the first.

    With antialias the scale determines their number, which may be only available at run time.
    """
    reach = 2 if settings.mode == "cubic" else 1
    if not settings.antialias:
        return 2 * reach, 1 - reach
    scale = read_static_scale(change)
    if scale is None:
        before = _bind_neighbors(node, reach, change)
        return 2 + 2 * before, -before
    first = math.floor(-reach / min(scale, 1.0)) + 1
    if 2 - 2 * first > _MAX_NEIGHBORS:
        raise node.error(
            "resize.scale_too_small",
            f"a scale of {scale} combines {2 - 2 * first} elements; the maximum is {_MAX_NEIGHBORS}.",
            "Use a larger scale.",
        )
    return 2 - 2 * first, first


def _bind_neighbors(node: Node, reach: int, change: ResizedAxis) -> Size:
    """Return the symbol of the number of weighted elements before the nearest one."""
    scales = [change.scale] if isinstance(change.scale, Value) else []

    def before(*buffers: Any) -> list[Any]:
        scale = tirx.min(change.scale_in_kernel(buffers[0] if buffers else None), to_float64(1.0))
        count = -to_index(tirx.floor(to_float64(-float(reach)) / scale)) - 1
        return [tirx.if_then_else(to_float64(change.out_size) > to_float64(0.0), count, tirx.const(reach - 1, "int64"))]

    counts = compute_sizes(node, "neighbors", 1, before, scales, [change.in_size, change.out_size])
    (symbol,) = bind_sizes(node, counts, ((change.out_size, 2), "float64"))
    return symbol


def compute_weight(settings: ResizeSettings, scale: Any, distance: Any) -> Any:
    """Return the weight of an element at that distance from the requested position.

    With antialias, it is the weight before normalization by the sum of all weights.
    """
    x, one, zero = tirx.abs(distance), to_float64(1.0), to_float64(0.0)
    if settings.antialias:
        x = x * let(tirx.min(scale, one))
    if settings.mode == "linear":
        return tirx.max(one - x, zero)
    a = settings.cubic
    near = ((to_float64(a + 2) * x - to_float64(a + 3)) * x) * x + one
    far = ((to_float64(a) * x - to_float64(5 * a)) * x + to_float64(8 * a)) * x - to_float64(4 * a)
    return tirx.Select(x <= one, near, tirx.Select(x < to_float64(2.0), far, zero))
