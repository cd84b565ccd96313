"""Sliding windows: how ONNX convolutions and pools cut an axis, by attributes kernel_shape, strides, pads and auto_pad.

Sizes are Python ints or TensorIR expressions, as the shapes of tensor expressions have them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ..importing import symbolic
from ..importing.compute import Element, Extent
from ..importing.node import Node
from ..importing.values import Value
from .asserted import required

_LARGEST = 2**31 - 1

_AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class Window:
    """A window over the spatial axes.

    pads holds all beginnings, then all ends; auto_pad, if not NOTSET, replaces it.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    auto_pad: str
    ceil: bool = False

    @staticmethod
    def of(node: Node, kernel: Sequence[int]) -> Window:
        """The node's attributes. Raises NodeError for lists of the wrong length, for numbers out of range, and for an
        unknown auto_pad."""
        n = len(kernel)
        lists = {name: tuple(node.attr(name, None) or default) for name, default in (
            ("strides", [1] * n), ("dilations", [1] * n), ("pads", [0] * 2 * n))}  # fmt: skip
        for name, given in lists.items():
            if len(given) != (2 * n if name == "pads" else n):
                raise node.error(f"attribute {name} is {list(given)} for {n} spatial axes.")
        for name, given in {"kernel_shape": tuple(kernel), **lists}.items():
            low = 0 if name == "pads" else 1
            if not all(low <= number <= _LARGEST for number in given):
                raise node.error(f"attribute {name} is {list(given)}.", f"Use numbers from {low} to {_LARGEST}.")
        auto_pad = node.attr("auto_pad", "NOTSET")
        if auto_pad not in _AUTO_PADS:
            raise node.error(f"attribute auto_pad is {auto_pad!r}.", f"Use one of {', '.join(_AUTO_PADS)}.")
        pads = lists["pads"] if auto_pad == "NOTSET" else (0,) * 2 * n
        return Window(
            tuple(kernel), lists["strides"], lists["dilations"], pads, auto_pad, bool(node.attr("ceil_mode", 0))
        )

    @property
    def elements(self) -> int:
        return math.prod(self.kernel)

    @property
    def leaves(self) -> bool:
        """Whether a window can lie partly outside the data."""
        return any(self.pads) or self.ceil or self.auto_pad.startswith("SAME")

    def reach(self, axis: int) -> int:
        """Positions that a window covers along an axis, holes included."""
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1

    def before(self, axis: int, size: Extent) -> Extent:
        """Padding in front of an axis of that size."""
        if not self.auto_pad.startswith("SAME"):
            return self.pads[axis]
        total = (_ceildiv(size, self.strides[axis]) - 1) * self.strides[axis] + self.reach(axis) - size
        total = tirx.max(total, tirx.const(0, "int64"))
        return _floordiv(total if self.auto_pad == "SAME_UPPER" else total + 1, 2)

    def count(self, axis: int, size: Extent) -> Extent:
        """How many windows fit along an axis of that size."""
        stride = self.strides[axis]
        if self.auto_pad.startswith("SAME"):
            return _ceildiv(size, stride)
        begin, end = self.pads[axis], self.pads[len(self.kernel) + axis]
        span = size + begin + end - self.reach(axis)
        if not self.ceil:
            return _floordiv(span, stride) + 1
        # A window must begin before the padding behind the data.
        return tirx.min(_ceildiv(span, stride) + 1, _ceildiv(size + begin, stride))

    def position(self, axis: int, size: Extent, window: Element, k: Element) -> Element:
        """Where element k of a window lies along an axis of that size; outside [0, size) it is padding."""
        return window * self.strides[axis] + k * self.dilations[axis] - self.before(axis, size)


def fitting(node: Node, x: Value, window: Window) -> Value:
    """x [N, D1, ..., C], over whose padded axes the window is known or asserted at run time to fit."""
    if window.auto_pad.startswith("SAME"):
        return x
    n = len(window.kernel)
    for axis, size in enumerate(x.shape[1:-1]):
        padding, reach = window.pads[axis] + window.pads[n + axis], window.reach(axis)
        text = f"the window covers {reach} places along axis {2 + axis}, where {node.name_of(x, False)} has {{}}"
        text += f" and {padding} of padding." if padding else "."
        x = required(node, x, symbolic.less_or_equal(reach - padding, size), text, size)
    return x


def _int64(value: int) -> Element:
    return tirx.const(value, "int64")


def _floordiv(a: Extent, b: int) -> Extent:
    return tirx.floordiv(a, _int64(b))


def _ceildiv(a: Extent, b: int) -> Extent:
    return tirx.floordiv(a + (b - 1), _int64(b))
