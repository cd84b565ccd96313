"""What Resize computes along one axis: coordinates in X, neighbors and weights, in float64 as the standard has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..importing.node import Node
from ..importing.values import Size, Value
from ..tensorir.independent import independent
from .kernels import let, loops
from .run_time import bind, compute_sizes

_MOST_NEIGHBORS = 2**24  # elements that one place of a result weighs


@dataclass(frozen=True)
class Settings:
    """The attributes of a node."""

    mode: str
    coordinates: str
    rounding: str = "floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False
    extrapolation: float = 0.0


@dataclass(frozen=True, eq=False)
class Along:
    """How one axis changes: places of X, of the result, and the scale: a number, None for the ratio of sizes, or a
    float64 tensor of one element. roi, for tf_crop_and_resize, is where the result begins and ends in X, in its length:
    a float64 tensor [2]."""

    axis: int
    given: Size
    made: Size
    scale: float | Value | None
    roi: Value | None = None

    @property
    def grows(self) -> bool:
        known = known_scale(self)
        return known is None or known >= 1

    def scale_in_kernel(self, buffer: Any) -> Any:
        """Return the scale as a kernel computes with it. buffer holds it where it is a tensor."""
        if isinstance(self.scale, Value):
            return buffer[tirx.const(0, "int64")]
        return wide(self.made) / wide(self.given) if self.scale is None else wide(self.scale)

    def table(self, node: Node, name: str, body: Callable[..., Any], dtype: str, columns: Size | None = None) -> Value:
        """body(index, place) at every place of the result: place has what the run knows of the axis.

        A kernel of its own: TVM does not fuse two functions that are given one symbol.
        """
        scale = [self.scale] if isinstance(self.scale, Value) else []
        roi = [] if self.roi is None else [self.roi]
        shape = (self.made,) if columns is None else (self.made, columns)

        def statements(*buffers: Any) -> None:
            *reads, table = buffers
            zero, one = (tirx.const(n, "int64") for n in (0, 1))
            ends = (reads[-1][zero], reads[-1][one]) if roi else (wide(0.0), wide(1.0))
            place = Place(
                self.given, self.made, self.scale_in_kernel(reads[0] if scale else None), ends, self.scale is None
            )
            with independent(*table.shape) as index:
                T.buffer_store(table, body(index, place), list(index))

        (result,) = loops(node, name, statements, [*scale, *roi], [(shape, dtype)], sizes=[self.given, self.made])
        return result


@dataclass(frozen=True)
class Place:
    """Of an axis: places of X and of the result (int64), the scale and the roi (float64), and whether the scale is the
    ratio of the sizes."""

    given: Any
    made: Any
    scale: Any
    roi: tuple[Any, Any]
    by_sizes: bool


def known_scale(change: Along) -> float | None:
    if change.scale is None and isinstance(change.given, int) and isinstance(change.made, int) and change.given:
        return change.made / change.given
    return None if isinstance(change.scale, Value) else change.scale


def wide(value: Any) -> Any:
    return tirx.const(float(value), "float64") if isinstance(value, int | float) else value.astype("float64")


def coordinate(settings: Settings, o: Any, place: Place) -> Any:
    o, given, made, scale = wide(o), wide(place.given), wide(place.made), place.scale
    zero, half, one = wide(0.0), wide(0.5), wide(1.0)
    length = made if place.by_sizes else given * scale
    rest = length - one  # 0 where the result has one place, which is place 0
    safe = tirx.Select(rest == zero, one, rest)
    if settings.coordinates == "align_corners":
        return tirx.Select(rest == zero, zero, o * (given - one) / safe)
    if settings.coordinates == "asymmetric":
        return o / scale
    if settings.coordinates == "tf_crop_and_resize":
        first, last = place.roi
        span = (last - first) * (given - one)
        return tirx.Select(rest == zero, span * half, o * span / safe) + first * (given - one)
    center = (o + half) / scale - half
    if settings.coordinates == "pytorch_half_pixel":
        return tirx.Select(rest == zero, -half, center)
    if settings.coordinates == "half_pixel_symmetric":
        return center + given * half * (one - made / length)
    return center


def clamped(index: Any, given: Any) -> Any:
    zero = tirx.const(0, "int64")
    return tirx.max(tirx.min(index, given - 1), zero)


def as_index(value: Any) -> Any:
    """A coordinate as an index; those far outside of every X stay there."""
    most = wide(2.0**40)
    return tirx.max(tirx.min(value, most), -most).astype("int64")


def neighbors(node: Node, settings: Settings, change: Along) -> tuple[Size, Size]:
    """Return how many elements are weighed, and where the first of them is.

    With antialias they are as many as the scale asks for, which may be known to the run only.
    """
    reach = 2 if settings.mode == "cubic" else 1
    if not settings.antialias:
        return 2 * reach, 1 - reach
    scale = known_scale(change)
    if scale is None:
        before = _neighbors_of_run(node, reach, change)
        return 2 + 2 * before, -before
    first = math.floor(-reach / min(scale, 1.0)) + 1
    if 2 - 2 * first > _MOST_NEIGHBORS:
        raise node.error(f"a scale of {scale} weighs {2 - 2 * first} elements.", "Use a larger one.")
    return 2 - 2 * first, first


def _neighbors_of_run(node: Node, reach: int, change: Along) -> Size:
    """Return the symbol of how many elements before the nearest one are weighed."""
    scales = [change.scale] if isinstance(change.scale, Value) else []

    def before(*buffers: Any) -> list[Any]:
        scale = tirx.min(change.scale_in_kernel(buffers[0] if buffers else None), wide(1.0))
        count = -as_index(tirx.floor(wide(-float(reach)) / scale)) - 1
        return [tirx.if_then_else(wide(change.made) > wide(0.0), count, tirx.const(reach - 1, "int64"))]

    counts = compute_sizes(node, "neighbors", 1, before, scales, [change.given, change.made])
    (symbol,) = bind(node, counts, ((change.made, 2), "float64"))
    return symbol


def weight_at(settings: Settings, scale: Any, distance: Any) -> Any:
    """Of an element so far from the place asked for; with antialias before it is divided by the sum of all."""
    x, one, zero = tirx.abs(distance), wide(1.0), wide(0.0)
    if settings.antialias:
        x = x * let(tirx.min(scale, one))
    if settings.mode == "linear":
        return tirx.max(one - x, zero)
    a = settings.cubic
    near = ((wide(a + 2) * x - wide(a + 3)) * x) * x + one
    far = ((wide(a) * x - wide(5 * a)) * x + wide(8 * a)) * x - wide(4 * a)
    return tirx.Select(x <= one, near, tirx.Select(x < wide(2.0), far, zero))
