"""Normalization: ONNX LayerNormalization, RMSNormalization, and instance, group, batch and Lp normalization.

Statistics are computed in float32 (float64 where stash_type or the data require it). The variance is computed from
centered data, since a sum of squares would cancel. Scale and bias are applied before the only rounding to the result
type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
from tvm import te, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_broadcastable, assert_channel_vectors, assert_divisible
from ..helpers.channels import unify_layouts
from ..helpers.compute import SUM, Element, Extent, read_element, reduce_axes, require_numbers, widen_dtype
from ..helpers.contents import normalize_axis
from ..helpers.requirements import reject_attribute, require_choice, require_float, require_range

_MAX_CHANNELS = 2**31 - 1  # of a window of LRN


@dataclass(frozen=True)
class _Statistics:
    """Mean and 1 / sqrt(variance + epsilon) of element(*index) over axes of an index space."""

    shape: Sequence[Extent]
    axes: Sequence[int]
    element: Callable[..., Element]
    epsilon: float
    dtype: str

    def at(self, tensor: te.Tensor, index: Sequence[Element]) -> Element:
        """Return the statistic that covers an index of the space."""
        return tensor(*(tirx.const(0, "int64") if axis in self.axes else i for axis, i in enumerate(index)))

    def average(self, element: Callable[..., Element], finish: Callable[[Element], Element], name: str) -> te.Tensor:
        """Return finish(mean of element over the axes); the axes stay, with size 1."""
        count = functools.reduce(lambda n, axis: n * self.shape[axis], self.axes, tirx.const(1, "int64"))
        if isinstance(count, tirx.IntImm) and int(count) == 0:
            count = tirx.const(1, "int64")  # TVM rejects a division by a constant 0
        accumulators = reduce_axes(self.shape, self.axes, SUM, element, f"{name}_sum")
        return te.compute(
            accumulators.shape, lambda *index: finish(accumulators(*index) / count.astype(self.dtype)), name=name
        )

    def mean(self) -> te.Tensor:
        return self.average(self.element, lambda x: x, "mean")

    def scale(self, mean: te.Tensor | None) -> te.Tensor:
        """Return 1 / sqrt(variance + epsilon); without a mean, of the mean square."""

        def square(*index: Element) -> Element:
            x = self.element(*index)
            x = x if mean is None else x - self.at(mean, index)
            return x * x

        return self.average(square, lambda variance: 1.0 / tirx.sqrt(variance + self.epsilon), "inv_std_dev")


def _choose_stage_one_dtype(dtype: str, stash: str) -> str:
    return "float64" if "float64" in (dtype, stash) else "float32"


def normalize_last_axes(
    node: Node, x: Value, parameters: Sequence[Value], centered: bool, epsilon: float = 1e-5
) -> Value:
    """Emit (x - mean) / sqrt(variance + epsilon) * scale + bias over the axes from attribute axis on.

    Without centered the mean is 0. parameters are scale, whose type is that of the result, and the optional bias.
    epsilon is the default of the attribute.
    """
    require_numbers(node, x, *parameters)
    x, *parameters = assert_broadcastable(node, x, *parameters)
    statistics = _make_last_axes_statistics(node, x, epsilon)
    dtype = parameters[0].dtype

    def kernel(x: te.Tensor, scale: te.Tensor, *bias: te.Tensor) -> te.Tensor:
        s = statistics(x)
        mean = s.mean() if centered else None
        inverse = s.scale(mean)

        def result(*index: Element) -> Element:
            y = s.element(*index) if mean is None else s.element(*index) - s.at(mean, index)
            y = y * s.at(inverse, index) * read_element(scale, index).astype(s.dtype)
            return (y + read_element(bias[0], index).astype(s.dtype) if bias else y).astype(dtype)

        return te.compute(x.shape, result, name="normalized")

    tensors = [node.tensor(v) for v in (x, *parameters)]
    return node.emit_te(kernel, *tensors, dtype=dtype, primfunc_name_hint=node.op_type.lower())


def _make_last_axes_statistics(node: Node, x: Value, epsilon: float = 1e-5) -> Callable[[te.Tensor], _Statistics]:
    """Return the statistics over the axes from attribute axis on.

    epsilon is the default of the attribute.
    """
    axes = range(normalize_axis(node, node.attr("axis", -1), x.rank), x.rank)
    dtype, epsilon = _choose_stage_one_dtype(x.dtype, _read_stash_dtype(node)), node.attr("epsilon", epsilon)
    return lambda t: _Statistics(t.shape, axes, lambda *i: t(*i).astype(dtype), epsilon, dtype)


def _read_stash_dtype(node: Node) -> str:
    return onnx.helper.tensor_dtype_to_np_dtype(node.attr("stash_type", onnx.TensorProto.FLOAT)).name


@op("LayerNormalization", since=17)
def layer_normalization(
    node: Node, x: Value, scale: Value, bias: Value | None = None
) -> tuple[Value, Value | None, Value | None]:
    """Emit Y, Mean and InvStdDev.

    The last two are computed separately: inference does not use them.
    """
    y = normalize_last_axes(node, x, [scale] if bias is None else [scale, bias], centered=True)
    statistics, stash = _make_last_axes_statistics(node, x), _read_stash_dtype(node)

    def mean(t: te.Tensor) -> te.Tensor:
        return _cast_stash(statistics(t).mean(), stash)

    def inv_std_dev(t: te.Tensor) -> te.Tensor:
        s = statistics(t)
        return _cast_stash(s.scale(s.mean()), stash)

    extras = [node.emit_te(k, node.tensor(x)) if node.has_output(n) else None for n, k in ((1, mean), (2, inv_std_dev))]
    return y, extras[0], extras[1]


def _cast_stash(tensor: te.Tensor, dtype: str) -> te.Tensor:
    return te.compute(tensor.shape, lambda *index: tensor(*index).astype(dtype), name="stash")


@op("RMSNormalization", since=23)
def rms_normalization(node: Node, x: Value, scale: Value) -> Value:
    return normalize_last_axes(node, x, [scale], centered=False)


# -- over channels: x is [N, C, D1, ...], scale and bias are [C] ------------------------------------------------------


@op("InstanceNormalization", since=6)
def instance_normalization(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    return _normalize_groups(node, x, scale, bias, None)


@op("GroupNormalization", since=21)
def group_normalization(node: Node, x: Value, scale: Value, bias: Value) -> Value:
    return _normalize_groups(node, x, scale, bias, node.attr("num_groups"))


def _normalize_groups(node: Node, x: Value, scale: Value, bias: Value, groups: int | None) -> Value:
    """Normalize over the channels of a group and all positions.

    groups None means one channel per group.
    """
    require_numbers(node, x, scale, bias)
    x, scale, bias = assert_channel_vectors(node, x, scale, bias)
    if scale.shape == (0,):  # nothing to normalize, and no group of channels to divide by
        return x
    if groups is not None:
        x = assert_divisible(node, x, 1, groups, "num_groups")
    dtype = _choose_stage_one_dtype(x.dtype, _read_stash_dtype(node))
    epsilon = node.attr("epsilon", 1e-5)

    def kernel(x: te.Tensor, scale: te.Tensor, bias: te.Tensor) -> te.Tensor:
        size = 1 if groups is None else tirx.floordiv(x.shape[1], tirx.const(groups, "int64"))  # channels of a group
        space = [x.shape[0], x.shape[1] if groups is None else groups, size, *x.shape[2:]]

        def element(n: Element, group: Element, c: Element, *position: Element) -> Element:
            return x(n, group * size + c, *position).astype(dtype)

        s = _Statistics(space, range(2, len(space)), element, epsilon, dtype)
        mean = s.mean()
        inverse = s.scale(mean)

        def result(n: Element, channel: Element, *position: Element) -> Element:
            group = tirx.floordiv(channel, size)
            index = (n, group, tirx.floormod(channel, size), *position)
            gain, offset = scale(channel).astype(dtype), bias(channel).astype(dtype)
            y = (x(n, channel, *position).astype(dtype) - s.at(mean, index)) * s.at(inverse, index)
            return (y * gain + offset).astype(x.dtype)

        return te.compute(x.shape, result, name="normalized")

    tensors = [node.tensor(v) for v in (x, scale, bias)]
    return node.emit_te(kernel, *tensors, primfunc_name_hint=node.op_type.lower())


@op("BatchNormalization", since=9)
def batch_normalization(node: Node, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
    """Emit x * gain + offset per channel, from the mean and variance inputs."""
    require_numbers(node, x, scale, bias, mean, variance)
    reject_attribute(
        node,
        "training_mode",
        0,
        "Export the model for inference (model.eval()).",
        code="batch_normalization.training_unsupported",
    )
    x, scale, bias, mean, variance = assert_channel_vectors(node, x, scale, bias, mean, variance)
    epsilon, dtype = node.attr("epsilon", 1e-5), widen_dtype(x.dtype)
    (x,), order, back = unify_layouts(node, x)
    channel = order.index(1)

    def kernel(x: te.Tensor, scale: te.Tensor, bias: te.Tensor, mean: te.Tensor, variance: te.Tensor) -> te.Tensor:
        def at(tensor: te.Tensor, c: Element) -> Element:
            return tensor(c).astype(dtype)

        gain = te.compute(scale.shape, lambda c: at(scale, c) / tirx.sqrt(at(variance, c) + epsilon), name="gain")
        offset = te.compute(scale.shape, lambda c: at(bias, c) - at(mean, c) * gain(c), name="offset")

        def result(*index: Element) -> Element:
            c = index[channel]
            return (x(*index).astype(dtype) * gain(c) + offset(c)).astype(x.dtype)

        return te.compute(x.shape, result, name="normalized")

    tensors = [node.tensor(v) for v in (x, scale, bias, mean, variance)]
    return back(node.emit_te(kernel, *tensors, primfunc_name_hint="batch_normalization"))


@op("LRN", since=1)
def lrn(node: Node, x: Value) -> Value:
    """Emit x / (bias + alpha / size * s)^beta.

    s is the sum of squares over `size` channels around the element's own: https://onnx.ai/onnx/operators/onnx__LRN.html
    """
    (x,) = assert_channel_vectors(node, x)
    require_numbers(node, x)
    size, alpha, beta, bias = (node.attr(*a) for a in (("size",), ("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    require_range(node, "size", size, 1, _MAX_CHANNELS, code="lrn.size_out_of_range")
    require_float(node, "X", x)
    dtype, before = widen_dtype(x.dtype), (size - 1) // 2
    (x,), order, back = unify_layouts(node, x)
    channel = order.index(1)

    def kernel(x: te.Tensor) -> te.Tensor:
        squares = te.compute(x.shape, lambda *i: read_element(x, i) * read_element(x, i), name="squares")

        def around(*index: Element) -> Element:
            k = te.reduce_axis((0, size), "k")
            neighbor = index[channel] + k.var - before
            is_inside = tirx.all(neighbor >= 0, neighbor < x.shape[channel])
            square = squares(*index[:channel], neighbor, *index[channel + 1 :])
            return te.sum(tirx.if_then_else(is_inside, square, tirx.const(0, dtype)), axis=[k])

        windows = te.compute(x.shape, around, name="sums")

        def result(*index: Element) -> Element:
            base = tirx.const(bias, dtype) + windows(*index) * tirx.const(alpha / size, dtype)
            return (read_element(x, index) * tirx.power(base, tirx.const(-beta, dtype))).astype(x.dtype)

        return te.compute(x.shape, result, name="normalized")

    return back(node.emit_te(kernel, node.tensor(x), primfunc_name_hint="lrn"))


# -- by a norm --------------------------------------------------------------------------------------------------------


@op("LpNormalization", since=1)
def lp_normalization(node: Node, x: Value) -> Value:
    """Emit x / |x|_p along one axis, 0 where the norm is 0."""
    require_numbers(node, x)
    axis, p, dtype = normalize_axis(node, node.attr("axis", -1), x.rank), node.attr("p", 2), widen_dtype(x.dtype)
    require_choice(node, "p", p, (1, 2), code="lp_normalization.p_unsupported")

    def kernel(x: te.Tensor) -> te.Tensor:
        def power(*index: Element) -> Element:
            value = read_element(x, index)
            return tirx.abs(value) if p == 1 else value * value

        accumulators = reduce_axes(x.shape, [axis], SUM, power, "sum")
        norm = te.compute(
            accumulators.shape, lambda *i: accumulators(*i) if p == 1 else tirx.sqrt(accumulators(*i)), name="norm"
        )

        def result(*index: Element) -> Element:
            n = norm(*(tirx.const(0, "int64") if k == axis else i for k, i in enumerate(index)))
            zero = tirx.const(0.0, dtype)
            return tirx.Select(n == zero, zero, read_element(x, index) / n).astype(x.dtype)

        return te.compute(x.shape, result, name="normalized")

    return node.emit_te(kernel, node.tensor(x), primfunc_name_hint="lp_normalization")
