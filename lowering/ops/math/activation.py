"""Activation functions: ONNX Sigmoid, Gelu, Swish, Relu, Softmax and similar operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import te, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_broadcastable, assert_shape
from ..helpers.compute import (
    MAXIMUM,
    SUM,
    Element,
    Reducer,
    dtype_of,
    maximum,
    minimum,
    pointwise,
    read_element,
    reduce_axes,
    require_numbers,
)
from ..helpers.contents import normalize_axis
from ..helpers.requirements import read_choice, require_choice

# -- pointwise --------------------------------------------------------------------------------------------------------


_FUNCTIONS: dict[str, tuple[Callable[..., Element], dict[str, Any]]] = {
    "Tanh": (tirx.tanh, {}),
    "Clip": (lambda x, min, max: _clip(x, min, max), {"min": -math.inf, "max": math.inf}),
}
"""The scalar function of each activation by name, and the defaults of its attributes."""


def emit_activation(node: Node, x: Value, name: str, attributes: Mapping[str, float]) -> Value:
    """Emit the activation that a fused node names, with its attributes where present.

    Raises:
        NodeError: The activation is not supported.
    """
    require_choice(node, "activation", name, sorted(_FUNCTIONS), code="node.activation_unsupported")
    function, defaults = _FUNCTIONS[name]
    parameters = {key: attributes.get(key, default) for key, default in defaults.items()}
    return pointwise(node, lambda element: function(element, **parameters), x, name=name.lower())


def _register(name: str, since: int, function: Callable[..., Element], **defaults: Any) -> None:
    """Register an operator whose attributes, with these defaults, are arguments of the scalar function."""
    _FUNCTIONS[name] = function, defaults

    @op(name, since=since)
    def lower(node: Node, x: Value) -> Value:
        attributes = {key: node.attr(key, default) for key, default in defaults.items()}
        return pointwise(node, lambda element: function(element, **attributes), x, name=name.lower())


def _where(condition: Element, a: Element | float, b: Element | float) -> Element:
    """Return a where the condition is true, else b; one of them may be a number."""
    dtype = next(v.ty.dtype for v in (a, b) if not isinstance(v, (int, float)))
    a, b = (tirx.const(v, dtype) if isinstance(v, (int, float)) else v for v in (a, b))
    return tirx.Select(condition, a, b)


def _clip(x: Element, low: float, high: float) -> Element:
    return minimum(maximum(x, tirx.const(low, dtype_of(x))), tirx.const(high, dtype_of(x)))


def _sigmoid(x: Element) -> Element:
    return 1.0 / (1.0 + tirx.exp(-x))


def swish(x: Element, alpha: float) -> Element:
    return x / (1.0 + tirx.exp(-x if alpha == 1.0 else x * -alpha))


def gelu(x: Element, approximate: str) -> Element:
    if approximate == "tanh":  # (1 + tanh u) / 2 is 1 / (1 + e^(-2 u)), which does not cancel
        return x / (1.0 + tirx.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + tirx.erf(x * math.sqrt(0.5)))


def _relu(x: Element) -> Element:
    return _where(x < 0, 0, x)


def _leaky_relu(x: Element, alpha: float) -> Element:
    return _where(x < 0.0, alpha * x, x)


def _clipped_line(x: Element, slope: float, offset: float) -> Element:
    """Return slope x + offset, clamped to [0, 1]; NaN where x is."""
    y = slope * x + offset
    return _where(y < 0.0, 0.0, _where(y > 1.0, 1.0, y))


def _elu(x: Element, alpha: float) -> Element:
    return _where(x < 0.0, alpha * (tirx.exp(x) - 1.0), x)


def _softplus(x: Element) -> Element:
    """Return log(1 + e^x) without overflow, and without losing small e^x."""
    return _where(x > 0.0, x, 0.0) + tirx.log1p(tirx.exp(-tirx.abs(x)))


def _mish(x: Element) -> Element:
    """Return x tanh(softplus(x)) = x n / (n + 2) with n = e^x (e^x + 2).

    1 - n / (n + 2) is below rounding from x = 20 on.
    """
    e = tirx.exp(x)
    n = e * (e + 2.0)
    return _where(x > 20.0, x, x * n / (n + 2.0))


def _shrink(x: Element, lambd: float, bias: float) -> Element:
    x = x if str(x.ty.dtype).startswith("float") else x.astype("float64")
    return _where(x < -lambd, x + bias, _where(x > lambd, x - bias, 0.0))


@op("Gelu", since=20)
def _gelu(node: Node, x: Value) -> Value:
    form = read_choice(node, "approximate", "none", ("none", "tanh"), code="gelu.approximate_unsupported")
    return pointwise(node, lambda element: gelu(element, form), x, name="gelu")


_register("Sigmoid", 6, _sigmoid)
_register("Swish", 24, swish, alpha=1.0)
_register("Relu", 6, _relu)
_register("LeakyRelu", 6, _leaky_relu, alpha=0.01)
_register("ThresholdedRelu", 10, lambda x, alpha: _where(x > alpha, x, 0.0), alpha=1.0)
_register("HardSigmoid", 6, lambda x, alpha, beta: _clipped_line(x, alpha, beta), alpha=0.2, beta=0.5)
_register("HardSwish", 14, lambda x: x * _clipped_line(x, 1 / 6, 0.5))
_register("Elu", 6, _elu, alpha=1.0)
_register("Celu", 12, lambda x, alpha: _where(x < 0.0, alpha * (tirx.exp(x / alpha) - 1.0), x), alpha=1.0)
_register("Selu", 6, lambda x, alpha, gamma: gamma * _elu(x, alpha), alpha=1.6732631921768188, gamma=1.0507010221481323)
_register("Softplus", 1, _softplus)
_register("Softsign", 1, lambda x: x / (1.0 + tirx.abs(x)))
_register("Mish", 18, _mish)
_register("Shrink", 9, _shrink, lambd=0.5, bias=0.0)


@op("SwiGLU", since=28)
def swiglu(node: Node, gate: Value, x: Value) -> Value:
    alpha = node.attr("alpha", 1.0)
    if gate.rank != x.rank:
        raise node.error(
            "swiglu.rank_mismatch", f"the inputs have ranks {gate.rank} and {x.rank}.", "Give them the same shape."
        )
    x = assert_shape(node, x, gate.shape)
    return pointwise(node, lambda gate, x: swish(gate, alpha) * x, gate, x, name="swiglu")


@op("PRelu", since=9)
def prelu(node: Node, x: Value, slope: Value) -> Value:
    x, slope = assert_broadcastable(node, x, slope)
    return pointwise(node, lambda x, slope: _where(x < 0, slope * x, x), x, slope, name="prelu")


# -- along axes -------------------------------------------------------------------------------------------------------

# TensorIR's own max, which schedules recognize. Where it drops a NaN, the sum of the exponentials still has it.
_PEAK = Reducer(te.max, tirx.min_value)


def _softmax(x: te.Tensor, axes: Sequence[int]) -> te.Tensor:
    """Return p / sum p with p = e^(x - m), m the maximum."""
    at = _make_reduced_index(axes)
    m = reduce_axes(x.shape, axes, _PEAK, lambda *i: read_element(x, i), "m")
    p = te.compute(x.shape, lambda *i: tirx.exp(read_element(x, i) - m(*at(i))), name="p")
    l = reduce_axes(x.shape, axes, SUM, lambda *i: p(*i), "l")
    return te.compute(x.shape, lambda *i: (p(*i) / l(*at(i))).astype(x.dtype), name="softmax")


def _log_softmax(x: te.Tensor, axes: Sequence[int]) -> te.Tensor:
    """Return x - m - log(sum e^(x - m)) with m the maximum."""
    at = _make_reduced_index(axes)
    m = reduce_axes(x.shape, axes, _PEAK, lambda *i: read_element(x, i), "m")
    l = reduce_axes(x.shape, axes, SUM, lambda *i: tirx.exp(read_element(x, i) - m(*at(i))), "l")

    def result(*i: Element) -> Element:
        return (read_element(x, i) - m(*at(i)) - tirx.log(l(*at(i)))).astype(x.dtype)

    return te.compute(x.shape, result, name="log_softmax")


def _hardmax(x: te.Tensor, axes: Sequence[int]) -> te.Tensor:
    """Return 1 at the first maximum in row-major order along the axes, 0 elsewhere."""
    at = _make_reduced_index(axes)
    m = reduce_axes(x.shape, axes, MAXIMUM, lambda *i: read_element(x, i), "m")

    def position(index: Sequence[Element]) -> Element:
        offset = tirx.const(0, "int64")
        for axis in axes:
            offset = offset * x.shape[axis] + index[axis]
        return offset.astype("int64")

    last = tirx.max_value("int64")
    first = reduce_axes(
        x.shape,
        axes,
        Reducer(te.min, tirx.max_value),
        lambda *i: tirx.Select(read_element(x, i) == m(*at(i)), position(i), last),
        "first",
    )
    return te.compute(
        x.shape, lambda *i: tirx.Select(position(i) == first(*at(i)), 1.0, 0.0).astype(x.dtype), name="hardmax"
    )


def _make_reduced_index(axes: Sequence[int]) -> Callable[[Sequence[Element]], list[Element]]:
    return lambda index: [tirx.const(0, "int64") if axis in axes else i for axis, i in enumerate(index)]


def _emit_along_axes(node: Node, x: Value, kernel: Callable[[te.Tensor, Sequence[int]], te.Tensor]) -> Value:
    """Emit a function along the axes of attribute axis.

    From opset 13 on it is one axis (default: the last). Before, it is that axis (default 1) and all following ones.
    """
    require_numbers(node, x)
    if node.version >= 13:
        axes = [normalize_axis(node, node.attr("axis", -1), x.rank)]
    else:
        axes = list(range(normalize_axis(node, node.attr("axis", 1), x.rank), x.rank))
    return node.emit_te(lambda t: kernel(t, axes), node.tensor(x), primfunc_name_hint=node.op_type.lower())


def emit_softmax(node: Node, x: Value, axes: Sequence[int]) -> Value:
    """Emit numbers that add up to 1 over all of the axes."""
    return node.emit_te(lambda t: _softmax(t, axes), node.tensor(x), primfunc_name_hint="softmax")


@op("Softmax", since=1)
def softmax(node: Node, x: Value) -> Value:
    return _emit_along_axes(node, x, _softmax)


@op("LogSoftmax", since=1)
def log_softmax(node: Node, x: Value) -> Value:
    return _emit_along_axes(node, x, _log_softmax)


@op("Hardmax", since=1)
def hardmax(node: Node, x: Value) -> Value:
    return _emit_along_axes(node, x, _hardmax)
