"""ONNX ConvTranspose: [N, C, D1, ...] with weights [C, M / group, k1, ...] gives [N, M, ...].

What a stride of s leaves between its steps are s phases of the result, and each is an ordinary convolution: with
o + before = q s + r, result y[o] is the sum over u of x[q - u] w[r + s u]. One convolution of ceil(k / s) places
computes all of them as channels (importing/channels.py), [N, Q1, ..., phases, M], and a copy puts them side by side:
the decomposition of sub-pixel convolution, https://arxiv.org/abs/1609.07009, section 2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx

from ..importing import symbolic
from ..importing.channels import channels_last, channels_second
from ..importing.compute import agreed, relax_call, with_shape
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import divisible, required
from .conv import convolved, kernel_of, vector_of
from .kernels import compute
from .matmul import rounded
from .window import Window

_MOST_WEIGHTS = 2**14  # of a pair of channels, with zeros where the kernel does not reach


@op("ConvTranspose", since=1)
def conv_transpose(node: Node, x: Value, w: Value, bias: Value | None = None) -> Value:
    kernel, group = kernel_of(node, x, w, "[C, M / group, k1, ...]"), node.attr("group", 1)
    w = divisible(node, w, 0, group, "group")
    channels = agreed(node, "the number of channels (C)", x.shape[1], w.shape[0])
    x = with_shape(node, x, (x.shape[0], channels, *x.shape[2:]))
    outputs = node.simplify(w.shape[1] * group)
    bias = None if bias is None else vector_of(node, bias, outputs)
    phases = _Phases.of(node, kernel)
    x, result, before = _extents(node, x, phases)
    w = _as_channels(node, w, phases, group)
    around = [u - 1 for u in phases.places]
    ones = (1,) * len(kernel)
    window = Window(tuple(phases.places), ones, ones, (*around, *around), "NOTSET")
    y = convolved(node, channels_last(node, x), w, window, group)
    y = _side_by_side(node, y, phases, result, before, outputs, group)
    if bias is not None:
        y = relax_call(node, relax.op.add, y, rounded(node, bias, y.dtype))
    return channels_second(node, rounded(node, y, x.dtype))


@dataclass(frozen=True)
class _Phases:
    """By axis: the strides, the places of the convolution that computes all phases, and the places that the kernel
    covers, holes included; behind those the output padding."""

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    kernel: tuple[int, ...]
    behind: tuple[int, ...]

    @staticmethod
    def of(node: Node, kernel: list[int]) -> _Phases:
        window = Window.of(node, kernel)
        behind = tuple(node.attr("output_padding", None) or [0] * len(kernel))
        if len(behind) != len(kernel) or any(not 0 <= b < max(s, d) for b, s, d in zip(
                behind, window.strides, window.dilations)):  # fmt: skip
            raise node.error(
                f"attribute output_padding is {list(behind)}.", "Give each axis a number below its stride or dilation."
            )
        phases = _Phases(window.strides, window.dilations, tuple(kernel), behind)
        weights = phases.count * math.prod(phases.places)
        if weights > _MOST_WEIGHTS:
            raise node.error(
                f"strides {list(window.strides)} and dilations {list(window.dilations)} make {weights} weights of each "
                f"pair of channels; the most are {_MOST_WEIGHTS}."
            )
        return phases

    def reach(self, axis: int) -> int:
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    @property
    def places(self) -> list[int]:
        return [-(-(self.reach(axis) + b) // s) for axis, (b, s) in enumerate(zip(self.behind, self.strides))]

    @property
    def count(self) -> int:
        return math.prod(self.strides)


def _extents(node: Node, x: Value, phases: _Phases) -> tuple[Value, list[Size], list[Size]]:
    """x, of which that is checked, and by axis the size of the result, and what is cut off in front of it."""
    n, auto = len(phases.strides), node.attr("auto_pad", "NOTSET")
    wanted = node.attr("output_shape", None)
    if wanted is not None and len(wanted) != n:
        raise node.error(f"attribute output_shape is {list(wanted)} for {n} spatial axes.")
    pads = list(node.attr("pads", None) or [0] * 2 * n)
    sizes: list[Size] = []
    before: list[Size] = []
    for axis, size in enumerate(x.shape[2:]):
        stride = phases.strides[axis]
        full = (size - 1) * stride + phases.reach(axis) + phases.behind[axis]
        if wanted is not None or auto.startswith("SAME"):
            length = size * stride if wanted is None else wanted[axis]
            total = symbolic.maximum(node.simplify(full - length), 0)
            first = total if auto == "SAME_UPPER" else total + 1
            begin = symbolic.divide(node.symbols, first, 2)
        else:
            begin, end = (0, 0) if auto == "VALID" else (pads[axis], pads[n + axis])
            length = node.simplify(full - begin - end)
            text = f"pads leave {{}} elements along axis {2 + axis}."
            x = required(node, x, symbolic.less_or_equal(0, length), text, length)
        sizes.append(node.simplify(length))
        before.append(begin)
    return x, sizes, before


def _as_channels(node: Node, w: Value, phases: _Phases, group: int) -> Value:
    """Weights [u1, ..., C / group, group * phases * M / group] of the convolution, zeros where the kernel ends."""
    inside = symbolic.divide(node.symbols, w.shape[0], group)
    outputs, places = w.shape[1], phases.places
    shape = (*places, inside, node.simplify(outputs * (group * phases.count)))

    def element(index: Any, read: Any, per_group: Any, width: Any) -> Any:
        *us, c, channel = index
        part, m = tirx.floordiv(channel, width), tirx.floormod(channel, width)
        g, phase = tirx.floordiv(part, phases.count), tirx.floormod(part, phases.count)
        at: list[Any] = []
        exists = []
        for axis in reversed(range(len(places))):
            r, phase = tirx.floormod(phase, phases.strides[axis]), tirx.floordiv(phase, phases.strides[axis])
            place = r + (places[axis] - 1 - us[axis]) * phases.strides[axis]
            dilation = phases.dilations[axis]
            exists += [place < phases.reach(axis), tirx.floormod(place, dilation) < 1]
            at.insert(0, tirx.floordiv(place, dilation))
        value = read(g * per_group + c, m, *at)
        return tirx.if_then_else(tirx.all(*exists), value, tirx.const(0, value.ty))

    if w.constant is None:
        return compute(node, "phases", element, [w], shape, [inside, symbolic.maximum(outputs, 1)])
    return node.constant(_phases_of(w.constant, phases, group))


def _phases_of(w: np.ndarray, phases: _Phases, group: int) -> np.ndarray:
    """The same of a known array."""
    channels, outputs = w.shape[:2]
    spread = np.zeros((channels, outputs, *(u * s for u, s in zip(phases.places, phases.strides))), w.dtype)
    taken = [slice(0, phases.reach(axis), dilation) for axis, dilation in enumerate(phases.dilations)]
    spread[(slice(None), slice(None), *taken)] = w
    n = len(phases.strides)
    cut = spread.reshape(group, channels // group, outputs, *itertools.chain(*zip(phases.places, phases.strides)))
    cut = np.flip(cut, tuple(3 + 2 * axis for axis in range(n)))
    places, strides = ([3 + 2 * axis + second for axis in range(n)] for second in (0, 1))
    cut = cut.transpose(*places, 1, 0, *strides, 2)
    return np.ascontiguousarray(cut.reshape(*phases.places, channels // group, -1))


def _side_by_side(
    node: Node, y: Value, phases: _Phases, sizes: list[Size], before: list[Size], outputs: Size, group: int
) -> Value:
    """[N, D1, ..., M] from phases [N, Q1, ..., group * phases * M / group]. Sizes that are asked for can be longer than
    what there is: then zeros are behind it."""
    n = len(sizes)
    longer = node.attr("output_shape", None) is not None or node.attr("auto_pad", "NOTSET").startswith("SAME")

    def element(index: Any, read: Any, *numbers: Any) -> Any:
        starts, width, ends = numbers[:n], numbers[n], numbers[n + 1 :]
        batch, *spatial, channel = index
        at, phase = [], tirx.const(0, "int64")
        for o, start, stride in zip(spatial, starts, phases.strides):
            at.append(tirx.floordiv(o + start, stride))
            phase = phase * stride + tirx.floormod(o + start, stride)
        g, m = (tirx.floordiv(channel, width), tirx.floormod(channel, width)) if group > 1 else (0, channel)
        value = read(batch, *at, (g * phases.count + phase) * width + m)
        if not longer:
            return value
        exists = tirx.all(*(place < end for place, end in zip(at, ends)))
        return tirx.if_then_else(exists, value, tirx.const(0, value.ty))

    width = symbolic.divide(node.symbols, outputs, group)
    shape = (y.shape[0], *sizes, outputs)
    return compute(node, "side_by_side", element, [y], shape, [*before, width, *(y.shape[1:-1] if longer else ())])
