"""ONNX ConvTranspose: [N, C, D1, ...] with weights [C, M / group, k1, ...] gives [N, M, ...].

The steps of a stride of s divide the result into s phases, each of which is an ordinary convolution. With o + before =
q s + r, result y[o] is the sum over u of x[q - u] w[r + s u]. One convolution with ceil(k / s) taps computes all phases
as channels (ops/helpers/channels.py), [N, Q1, ..., phases, M]. A copy interleaves them: the decomposition of sub-pixel
convolution, https://arxiv.org/abs/1609.07009, section 2.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_divisible, require
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import relax_call, unify_sizes
from ..helpers.kernels import compute
from ..math.matmul import round_to
from .conv import assert_bias_vector, emit_convolution, read_kernel_shape
from .window import SpatialWindow

_MAX_WEIGHTS = 2**14  # of a pair of channels, with zeros outside the kernel


@op("ConvTranspose", since=1)
def conv_transpose(node: Node, x: Value, w: Value, bias: Value | None = None) -> Value:
    kernel, group = read_kernel_shape(node, x, w, "[C, M / group, k1, ...]"), node.attr("group", 1)
    w = assert_divisible(node, w, 0, group, "group")
    channels = unify_sizes(node, "the number of channels (C)", x.shape[1], w.shape[0])
    x = node.cast_shape(x, (x.shape[0], channels, *x.shape[2:]))
    outputs = node.simplify(w.shape[1] * group)
    bias = None if bias is None else assert_bias_vector(node, bias, outputs)
    phases = _Phases.read(node, kernel)
    x, result, before = _compute_extents(node, x, phases)
    w = _arrange_phases(node, w, phases, group)
    around = [u - 1 for u in phases.kernel_taps]
    ones = (1,) * len(kernel)
    window = SpatialWindow(tuple(phases.kernel_taps), ones, ones, (*around, *around), "NOTSET")
    y = emit_convolution(node, channels_last(node, x), w, window, group)
    y = _interleave_phases(node, y, phases, result, before, outputs, group)
    if bias is not None:
        y = relax_call(node, relax.op.add, y, round_to(node, bias, y.dtype))
    return channels_second(node, round_to(node, y, x.dtype))


@dataclass(frozen=True)
class _Phases:
    """The phases of a transposed convolution, by axis.

    kernel_taps are the taps of the convolution that computes all phases. `reach` is the number of positions that the
    kernel covers, holes included.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    kernel: tuple[int, ...]
    output_padding: tuple[int, ...]

    @staticmethod
    def read(node: Node, kernel: list[int]) -> _Phases:
        window = SpatialWindow.read(node, kernel)
        output_padding = tuple(node.attr("output_padding", None) or [0] * len(kernel))
        if len(output_padding) != len(kernel) or any(not 0 <= b < max(s, d) for b, s, d in zip(
                output_padding, window.strides, window.dilations)):  # fmt: skip
            raise node.error(
                "conv_transpose.output_padding_unsupported",
                f"attribute output_padding is {list(output_padding)}.",
                "Give each axis a number below its stride or dilation.",
            )
        phases = _Phases(window.strides, window.dilations, tuple(kernel), output_padding)
        weights = phases.count * math.prod(phases.kernel_taps)
        if weights > _MAX_WEIGHTS:
            raise node.error(
                "conv_transpose.too_many_weights",
                f"strides {list(window.strides)} and dilations {list(window.dilations)} make {weights} weights for "
                f"each pair of channels; the maximum is {_MAX_WEIGHTS}.",
                "Use smaller strides or dilations.",
            )
        return phases

    def reach(self, axis: int) -> int:
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    @property
    def kernel_taps(self) -> list[int]:
        return [-(-(self.reach(axis) + b) // s) for axis, (b, s) in enumerate(zip(self.output_padding, self.strides))]

    @property
    def count(self) -> int:
        return math.prod(self.strides)


def _compute_extents(node: Node, x: Value, phases: _Phases) -> tuple[Value, list[Size], list[Size]]:
    """Return x with its checks, and by axis the size of the result and the elements cropped before it."""
    n, auto = len(phases.strides), node.attr("auto_pad", "NOTSET")
    output_shape = node.attr("output_shape", None)
    if output_shape is not None and len(output_shape) != n:
        raise node.error(
            "conv_transpose.output_shape_unsupported",
            f"attribute output_shape is {list(output_shape)} for {n} spatial axes.",
        )
    pads = list(node.attr("pads", None) or [0] * 2 * n)
    sizes: list[Size] = []
    before: list[Size] = []
    for axis, size in enumerate(x.shape[2:]):
        stride = phases.strides[axis]
        full = (size - 1) * stride + phases.reach(axis) + phases.output_padding[axis]
        if output_shape is not None or auto.startswith("SAME"):
            length = size * stride if output_shape is None else output_shape[axis]
            total = symbolic.maximum(node.simplify(full - length), 0)
            first = total if auto == "SAME_UPPER" else total + 1
            begin = symbolic.divide(node.symbols, first, 2)
        else:
            begin, end = (0, 0) if auto == "VALID" else (pads[axis], pads[n + axis])
            length = node.simplify(full - begin - end)
            text = f"pads leave {{}} elements along axis {2 + axis}."
            x = require(node, x, symbolic.less_or_equal(0, length), "conv_transpose.pads_too_large", text, length)
        sizes.append(node.simplify(length))
        before.append(begin)
    return x, sizes, before


def _arrange_phases(node: Node, w: Value, phases: _Phases, group: int) -> Value:
    """Return the weights [u1, ..., C / group, group * phases * M / group] of the convolution.

    They are zero after the end of the kernel.
    """
    inside = symbolic.divide(node.symbols, w.shape[0], group)
    outputs, taps = w.shape[1], phases.kernel_taps
    shape = (*taps, inside, node.simplify(outputs * (group * phases.count)))

    def element(index: Any, read: Any, per_group: Any, width: Any) -> Any:
        *us, c, channel = index
        block, m = tirx.floordiv(channel, width), tirx.floormod(channel, width)
        g, phase = tirx.floordiv(block, phases.count), tirx.floormod(block, phases.count)
        tap: list[Any] = []
        exists = []
        for axis in reversed(range(len(taps))):
            r, phase = tirx.floormod(phase, phases.strides[axis]), tirx.floordiv(phase, phases.strides[axis])
            position = r + (taps[axis] - 1 - us[axis]) * phases.strides[axis]
            dilation = phases.dilations[axis]
            exists += [position < phases.reach(axis), tirx.floormod(position, dilation) < 1]
            tap.insert(0, tirx.floordiv(position, dilation))
        value = read(g * per_group + c, m, *tap)
        return tirx.if_then_else(tirx.all(*exists), value, tirx.const(0, value.ty))

    if w.constant is None:
        return compute(node, "phases", element, [w], shape, [inside, symbolic.maximum(outputs, 1)])
    return node.constant(_arrange_constant_phases(w.constant, phases, group))


def _arrange_constant_phases(w: np.ndarray, phases: _Phases, group: int) -> np.ndarray:
    """Arrange the weights of a constant array in the same way."""
    channels, outputs = w.shape[:2]
    spread = np.zeros((channels, outputs, *(u * s for u, s in zip(phases.kernel_taps, phases.strides))), w.dtype)
    tap_slices = [slice(0, phases.reach(axis), dilation) for axis, dilation in enumerate(phases.dilations)]
    spread[(slice(None), slice(None), *tap_slices)] = w
    n = len(phases.strides)
    arranged = spread.reshape(
        group, channels // group, outputs, *itertools.chain(*zip(phases.kernel_taps, phases.strides))
    )
    arranged = np.flip(arranged, tuple(3 + 2 * axis for axis in range(n)))
    tap_axes, stride_axes = ([3 + 2 * axis + second for axis in range(n)] for second in (0, 1))
    arranged = arranged.transpose(*tap_axes, 1, 0, *stride_axes, 2)
    return np.ascontiguousarray(arranged.reshape(*phases.kernel_taps, channels // group, -1))


def _interleave_phases(
    node: Node, y: Value, phases: _Phases, sizes: list[Size], before: list[Size], outputs: Size, group: int
) -> Value:
    """Return [N, D1, ..., M] from phases [N, Q1, ..., group * phases * M / group].

    A requested size can be larger than the available one: zeros follow.
    """
    n = len(sizes)
    can_be_longer = node.attr("output_shape", None) is not None or node.attr("auto_pad", "NOTSET").startswith("SAME")

    def element(index: Any, read: Any, *numbers: Any) -> Any:
        starts, width, ends = numbers[:n], numbers[n], numbers[n + 1 :]
        batch, *spatial, channel = index
        position, phase = [], tirx.const(0, "int64")
        for o, start, stride in zip(spatial, starts, phases.strides):
            position.append(tirx.floordiv(o + start, stride))
            phase = phase * stride + tirx.floormod(o + start, stride)
        g, m = (tirx.floordiv(channel, width), tirx.floormod(channel, width)) if group > 1 else (0, channel)
        value = read(batch, *position, (g * phases.count + phase) * width + m)
        if not can_be_longer:
            return value
        exists = tirx.all(*(p < end for p, end in zip(position, ends)))
        return tirx.if_then_else(exists, value, tirx.const(0, value.ty))

    width = symbolic.divide(node.symbols, outputs, group)
    shape = (y.shape[0], *sizes, outputs)
    return compute(
        node, "side_by_side", element, [y], shape, [*before, width, *(y.shape[1:-1] if can_be_longer else ())]
    )
