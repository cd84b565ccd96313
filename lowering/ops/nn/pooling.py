"""Pooling: ONNX MaxPool, AveragePool and the global kinds over [N, C, D1, ...], computed with channels last."""

from __future__ import annotations

from collections.abc import Callable

from tvm import te, tirx

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.channels import channels_last, channels_second, unify_layouts
from ..helpers.compute import MAXIMUM, SUM, Element, Reducer, reduce_axes, require_numbers, widen_dtype
from ..helpers.requirements import require_float, require_range
from .unpooling import emit_max_with_indices
from .window import SpatialWindow, assert_window_fits

_MAX_NORM = 64  # p of a norm; larger powers exceed float32's range for numbers of 4


def _read_window(node: Node, x: Value) -> tuple[Value, SpatialWindow]:
    """Return X as [N, D1, ..., C], over which the window is proved or asserted to fit, and the window."""
    require_numbers(node, x)
    kernel = node.attr("kernel_shape")
    if len(kernel) != x.rank - 2 or not kernel:
        raise node.error(
            "node.kernel_shape_mismatch",
            f"attribute kernel_shape is {list(kernel)} for X of rank {x.rank}.",
            "Give X the shape [N, C, D1, ...], and the kernel a size for each of D1, ...",
        )
    window = SpatialWindow.read(node, kernel)
    return assert_window_fits(node, channels_last(node, x), window), window


def _compute_pooled(x: te.Tensor, window: SpatialWindow, reducer: Reducer, dtype: str) -> te.Tensor:
    """Return [N, windows, ..., C]: each window reduced; elements outside the data are the identity."""
    sizes = x.shape[1:-1]
    n = len(sizes)
    counts = [window.count(axis, size) for axis, size in enumerate(sizes)]
    ks = [te.reduce_axis((0, k), name=f"k{axis}") for axis, k in enumerate(window.kernel)]

    def element(batch: Element, *index: Element) -> Element:
        *windows, channel = index
        position = [window.position(axis, sizes[axis], windows[axis], ks[axis].var) for axis in range(n)]
        value = x(batch, *position, channel).astype(dtype)
        if window.can_exceed_data:
            is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(position, sizes)))
            value = tirx.if_then_else(is_inside, value, reducer.identity(dtype))
        return reducer.combine(value, axis=ks)

    return te.compute([x.shape[0], *counts, x.shape[-1]], element, name="pooled")


@op("MaxPool", since=8)
def max_pool(node: Node, x: Value) -> tuple[Value, Value | None]:
    x, window = _read_window(node, x)
    if node.has_output(1):
        return emit_max_with_indices(node, x, window)

    def kernel(t: te.Tensor) -> te.Tensor:
        pooled = _compute_pooled(t, window, MAXIMUM, widen_dtype(x.dtype))
        return te.compute(pooled.shape, lambda *i: pooled(*i).astype(x.dtype), name="max_pool")

    return channels_second(node, node.emit_te(kernel, node.tensor(x), primfunc_name_hint="max_pool")), None


@op("AveragePool", since=7)
def average_pool(node: Node, x: Value) -> Value:
    """Emit averages over windows.

    The divisor is the number of elements of the window, or without count_include_pad the number of those within the
    data.
    """
    return average_windows(node, x)


def average_windows(node: Node, x: Value, by_all: bool = False) -> Value:
    """Emit AveragePool.

    by_all divides by all elements of the window, even those after the padding that ceil_mode adds.
    """
    x, window = _read_window(node, x)
    padded = bool(node.attr("count_include_pad", 0))
    n, dtype = x.rank - 2, widen_dtype(x.dtype)

    def kernel(t: te.Tensor) -> te.Tensor:
        pooled, sizes = _compute_pooled(t, window, SUM, dtype), t.shape[1:-1]

        def divisor(*windows: Element) -> Element:
            if by_all:
                return tirx.const(window.elements, dtype)
            count = tirx.const(1, "int64")
            for axis in range(n):
                before = window.before(axis, sizes[axis])
                low, high = (-before, sizes[axis] + window.pads[n + axis]) if padded else (0, sizes[axis])
                if window.auto_pad.startswith("SAME") and padded:
                    high = sizes[axis] + window.reach(axis)  # such windows never leave their padding
                first = window.position(axis, sizes[axis], windows[axis], tirx.const(0, "int64"))
                count = count * _count_within(first, window.dilations[axis], window.kernel[axis], low, high)
            return count.astype(dtype)

        def mean(*index: Element) -> Element:
            return (pooled(*index) / divisor(*index[1:-1])).astype(x.dtype)

        return te.compute(pooled.shape, mean, name="average_pool")

    return channels_second(node, node.emit_te(kernel, node.tensor(x), primfunc_name_hint="average_pool"))


def _count_within(first: Element, step: int, count: int, low: Element, high: Element) -> Element:
    """Return how many of first, first + step, ... (count of them) lie in [low, high)."""
    begin = tirx.max(tirx.floordiv(low - first + (step - 1), tirx.const(step, "int64")), tirx.const(0, "int64"))
    end = tirx.min(tirx.floordiv(high - first + (step - 1), tirx.const(step, "int64")), tirx.const(count, "int64"))
    return end - begin


def _make_norm(node: Node, x: Value) -> tuple[Callable[[Element], Element], Callable[[Element], Element]]:
    """Return the functions |x|^p of an element and p-th root of a sum, for attribute p."""
    p = require_range(node, "p", node.attr("p", 2), 1, _MAX_NORM)
    require_float(node, "X", x)

    def power(x: Element) -> Element:
        if p % 2 == 0:
            return power_of(x * x, p // 2)
        return tirx.abs(x) if p == 1 else tirx.abs(x) * power_of(x * x, p // 2)

    def power_of(x: Element, n: int) -> Element:
        half = x if n < 2 else power_of(x * x, n // 2)
        return half * x if n > 1 and n % 2 else half

    def root(x: Element) -> Element:
        return tirx.sqrt(x) if p == 2 else x if p == 1 else tirx.pow(x, tirx.const(1 / p, x.ty.dtype))

    return power, root


@op("LpPool", since=2)
def lp_pool(node: Node, x: Value) -> Value:
    """Emit the p-norm of each window: https://onnx.ai/onnx/operators/onnx__LpPool.html"""
    x, window = _read_window(node, x)
    (power, root), dtype = _make_norm(node, x), widen_dtype(x.dtype)

    def kernel(t: te.Tensor) -> te.Tensor:
        powers = te.compute(t.shape, lambda *i: power(t(*i).astype(dtype)), name="powers")
        pooled = _compute_pooled(powers, window, SUM, dtype)
        return te.compute(pooled.shape, lambda *i: root(pooled(*i)).astype(x.dtype), name="lp_pool")

    return channels_second(node, node.emit_te(kernel, node.tensor(x), primfunc_name_hint="lp_pool"))


# -- over all positions -----------------------------------------------------------------------------------------------


def _identity(value: Element, *_: Element) -> Element:
    return value


def _emit_global_pool(
    node: Node,
    x: Value,
    reducer: Reducer,
    prepare: Callable[[Element], Element] = _identity,
    finish: Callable[[Element, Element], Element] = _identity,
) -> Value:
    """Emit finish(reduction of prepare(element) over all positions, number of positions)."""
    require_numbers(node, x)
    (x,), order, back = unify_layouts(node, x)
    axes, dtype = [position for position, axis in enumerate(order) if axis >= 2], widen_dtype(x.dtype)

    def kernel(t: te.Tensor) -> te.Tensor:
        pooled = reduce_axes(t.shape, axes, reducer, lambda *i: prepare(t(*i).astype(dtype)), "pooled")
        count = tirx.const(1, "int64")
        for axis in axes:
            count = count * t.shape[axis]

        def result(*index: Element) -> Element:
            return finish(pooled(*index), count.astype(dtype)).astype(x.dtype)

        return te.compute(pooled.shape, result, name="global_pool")

    return back(node.emit_te(kernel, node.tensor(x), primfunc_name_hint=node.op_type.lower()))


@op("GlobalAveragePool", since=1)
def global_average_pool(node: Node, x: Value) -> Value:
    return _emit_global_pool(node, x, SUM, finish=lambda value, count: value / count)


@op("GlobalMaxPool", since=1)
def global_max_pool(node: Node, x: Value) -> Value:
    return _emit_global_pool(node, x, MAXIMUM)


@op("GlobalLpPool", since=2)
def global_lp_pool(node: Node, x: Value) -> Value:
    """Emit the p-norm over all positions: https://onnx.ai/onnx/operators/onnx__GlobalLpPool.html"""
    power, root = _make_norm(node, x)
    return _emit_global_pool(node, x, SUM, prepare=power, finish=lambda value, _: root(value))
