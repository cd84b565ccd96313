"""Sliding windows of ONNX convolutions and pools, by attributes kernel_shape, strides, pads and auto_pad.

Sizes are Python ints or TensorIR expressions, as in the shapes of tensor expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ...importing.node import Node
from ...importing.values import Value
from ..helpers import symbolic
from ..helpers.assertions import require
from ..helpers.compute import Element, Extent
from ..helpers.requirements import read_choice

_MAX_ATTRIBUTE = 2**31 - 1

_AUTO_PADS = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class SpatialWindow:
    """A window over the spatial axes.

    pads contains all beginnings, then all ends. auto_pad, if not NOTSET, replaces it.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    auto_pad: str
    ceil: bool = False

    @staticmethod
    def read(node: Node, kernel: Sequence[int]) -> SpatialWindow:
        """Read the node's attributes.

        Raises:
            NodeError: A list has the wrong length, a number is out of range, or auto_pad is invalid.
        """
        n = len(kernel)
        lists = {name: tuple(node.attr(name, None) or default) for name, default in (
            ("strides", [1] * n), ("dilations", [1] * n), ("pads", [0] * 2 * n))}  # fmt: skip
        for name, numbers in lists.items():
            if len(numbers) != (2 * n if name == "pads" else n):
                raise node.error(
                    "node.attribute_length_mismatch", f"attribute {name} is {list(numbers)} for {n} spatial axes."
                )
        for name, numbers in {"kernel_shape": tuple(kernel), **lists}.items():
            low = 0 if name == "pads" else 1
            if not all(low <= number <= _MAX_ATTRIBUTE for number in numbers):
                raise node.error(
                    "node.value_out_of_range",
                    f"attribute {name} is {list(numbers)}.",
                    f"Use numbers from {low} to {_MAX_ATTRIBUTE}.",
                )
        auto_pad = read_choice(node, "auto_pad", "NOTSET", _AUTO_PADS, code="node.auto_pad_unsupported")
        pads = lists["pads"] if auto_pad == "NOTSET" else (0,) * 2 * n
        return SpatialWindow(
            tuple(kernel), lists["strides"], lists["dilations"], pads, auto_pad, bool(node.attr("ceil_mode", 0))
        )

    @property
    def elements(self) -> int:
        return math.prod(self.kernel)

    @property
    def can_exceed_data(self) -> bool:
        """Return whether a window can extend outside the data."""
        return any(self.pads) or self.ceil or self.auto_pad.startswith("SAME")

    def reach(self, axis: int) -> int:
        """Return the number of positions that a window covers along an axis, holes included."""
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1

    def before(self, axis: int, size: Extent) -> Extent:
        """Return the padding before an axis of that size."""
        if not self.auto_pad.startswith("SAME"):
            return self.pads[axis]
        total = (_ceildiv(size, self.strides[axis]) - 1) * self.strides[axis] + self.reach(axis) - size
        total = tirx.max(total, tirx.const(0, "int64"))
        return _floordiv(total if self.auto_pad == "SAME_UPPER" else total + 1, 2)

    def count(self, axis: int, size: Extent) -> Extent:
        """Return how many windows fit along an axis of that size."""
        stride = self.strides[axis]
        if self.auto_pad.startswith("SAME"):
            return _ceildiv(size, stride)
        begin, end = self.pads[axis], self.pads[len(self.kernel) + axis]
        span = size + begin + end - self.reach(axis)
        if not self.ceil:
            return _floordiv(span, stride) + 1
        # A window must begin before the padding after the data.
        return tirx.min(_ceildiv(span, stride) + 1, _ceildiv(size + begin, stride))

    def position(self, axis: int, size: Extent, window: Element, k: Element) -> Element:
        """Return the position of element k of a window along an axis; outside [0, size) it is padding."""
        return window * self.strides[axis] + k * self.dilations[axis] - self.before(axis, size)


def assert_window_fits(node: Node, x: Value, window: SpatialWindow) -> Value:
    """Return x [N, D1, ..., C], over whose padded axes the window is proved or asserted to fit."""
    if window.auto_pad.startswith("SAME"):
        return x
    n = len(window.kernel)
    for axis, size in enumerate(x.shape[1:-1]):
        padding, reach = window.pads[axis] + window.pads[n + axis], window.reach(axis)
        text = f"the window covers {reach} elements along axis {2 + axis}, where {node.describe(x, False)} has {{}}"
        text += f" and {padding} of padding." if padding else "."
        x = require(node, x, symbolic.less_or_equal(reach - padding, size), "node.window_too_large", text, size)
    return x


def _int64(value: int) -> Element:
    return tirx.const(value, "int64")


def _floordiv(a: Extent, b: int) -> Extent:
    return tirx.floordiv(a, _int64(b))


def _ceildiv(a: Extent, b: int) -> Extent:
    return tirx.floordiv(a + (b - 1), _int64(b))
