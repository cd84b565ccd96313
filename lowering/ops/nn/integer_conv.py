"""Convolutions of bytes: ONNX ConvInteger and QLinearConv.

Accumulators are exact in int32, as in integer_matmul.py. A convolution over all channels is a matmul of patches
[windows, k1 ... C], which are still bytes, with the weights [k1 ... C, M]. Positions outside the data contain the zero
point. A grouped convolution is a sum over windows.
"""

from __future__ import annotations

import math

from tvm import relax, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.channels import channels_second
from ..helpers.compute import Element, relax_call
from ..helpers.kernels import compute
from ..helpers.requirements import require_dtype
from ..math.integer_matmul import BYTES, broadcast_scale, integer_matmul, requantize
from ..tensor.cast import cast_to
from ..tensor.reshape import reshape_to
from .conv import accumulate_windows, assert_bias_vector, read_conv_operands
from .window import SpatialWindow


@op("ConvInteger", since=10)
def conv_integer(node: Node, x: Value, w: Value, x_zero: Value | None = None, w_zero: Value | None = None) -> Value:
    """Emit the int32 convolution.

    https://onnx.ai/onnx/operators/onnx__ConvInteger.html. The zero point of W is per tensor or per output channel.
    """
    return channels_second(node, _emit_accumulator(node, x, w, x_zero, w_zero))


@op("QLinearConv", since=10)
def qlinear_conv(
    node: Node,
    x: Value,
    x_scale: Value,
    x_zero: Value,
    w: Value,
    w_scale: Value,
    w_zero: Value,
    y_scale: Value,
    y_zero: Value,
    bias: Value | None = None,
) -> Value:
    """Emit the convolution over y_scale, rounded to nearest even, plus y_zero, saturated.

    The bias is int32, in units of x_scale w_scale: https://onnx.ai/onnx/operators/onnx__QLinearConv.html
    """
    accumulators = _emit_accumulator(node, x, w, x_zero, w_zero)
    if bias is not None:
        accumulators = relax_call(node, relax.op.add, accumulators, assert_bias_vector(node, bias, w.shape[0]))
    scales = broadcast_scale(node, x_scale), broadcast_scale(node, w_scale, w.shape[0]), broadcast_scale(node, y_scale)
    return channels_second(node, requantize(node, accumulators, *scales, broadcast_scale(node, y_zero)))


def _emit_accumulator(node: Node, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None) -> Value:
    """Emit the accumulators [N, D1, ..., M], int32."""
    for name, value in (("X", x), ("W", w)):
        require_dtype(node, name, value, BYTES)
    x_zero = None if x_zero is None else broadcast_scale(node, x_zero)
    w_zero = None if w_zero is None else broadcast_scale(node, w_zero, w.shape[0])
    x, w, window, group = read_conv_operands(node, x, w)
    if group > 1:
        return accumulate_windows(
            node, _subtract_zero_point(node, x, x_zero), _subtract_zero_point(node, w, w_zero), window, group
        )
    shape = window.elements * x.shape[-1], w.shape[-1]
    if w.constant is None:
        matrix = reshape_to(node, w, shape)
    else:
        matrix = node.constant(w.constant.reshape(math.prod(w.constant.shape[:-1]), w.constant.shape[-1]))
    return integer_matmul(node, _emit_patches(node, x, x_zero, window), matrix, x_zero, w_zero)


def _subtract_zero_point(node: Node, value: Value, zero: Value | None) -> Value:
    """Return numbers minus their zero point, in int32."""
    wide = cast_to(node, value, "int32")
    return wide if zero is None else relax_call(node, relax.op.subtract, wide, cast_to(node, zero, "int32"))


def _emit_patches(node: Node, x: Value, zero: Value | None, window: SpatialWindow) -> Value:
    """Emit [N, windows ..., k1 ... C] of x [N, D1, ..., C]."""
    axes, channels, sizes = len(window.kernel), x.shape[-1], x.shape[1:-1]
    counts = [node.simplify(window.count(axis, size)) for axis, size in enumerate(sizes)]
    if window.elements == 1 and not window.can_exceed_data and set(window.strides) == {1}:
        return x

    def element(index: tuple[Element, ...], x: Element, *rest: Element) -> Element:
        zero_point = [read() for read in rest[: len(zeros)]]
        *extents, c_count = rest[len(zeros) :]
        *windows, offset = index[1:]
        c, offset = offset % c_count, offset // c_count
        ks: list[Element] = []
        for size in reversed(window.kernel):
            ks.insert(0, offset % size)
            offset = offset // size
        position = [window.position(axis, extents[axis], windows[axis], ks[axis]) for axis in range(axes)]
        value = x(index[0], *position, c)
        if not window.can_exceed_data:
            return value
        is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(position, extents)))
        return tirx.if_then_else(is_inside, value, zero_point[0] if zero_point else tirx.const(0, value.ty))

    zeros = [zero] if zero is not None and window.can_exceed_data else []
    shape = (x.shape[0], *counts, node.simplify(window.elements * channels))
    return compute(node, "patches", element, [x, *zeros], shape, sizes=[*sizes, channels])
