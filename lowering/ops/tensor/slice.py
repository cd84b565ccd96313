"""Slice, with bounds that are constants, symbolic sizes, or tensors of the run."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_shape
from ..helpers.channels import unify_layouts
from ..helpers.contents import (
    can_fold_contents,
    fits_contents,
    fold_contents,
    normalize_axis,
    read_constant_ints,
    read_sizes,
)
from ..helpers.kernels import compute
from ..helpers.requirements import read_length, require_rank
from ..helpers.run_time import bind_sizes, compute_sizes
from .shape import ceil_divide, clamp_nonnegative

# INT_MAX and INT_MIN mean "to the end": clipped, so that adding a size to them does not overflow.
_MAX_BOUND = 2**48


@op("Slice", since=1)
def slice_1(node: Node, data: Value) -> Value:
    axes, starts, ends = (node.attr(name, None) for name in ("axes", "starts", "ends"))
    axes = range(len(starts)) if axes is None else axes
    return slice_axes(node, data, [normalize_axis(node, a, data.rank) for a in axes], starts, ends, [1] * len(starts))


@op("Slice", since=10)
def slice_10(
    node: Node, data: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None
) -> Value:
    first, last = read_sizes(starts), read_sizes(ends)
    count = read_length(node, "starts", starts)
    for name, vector in (("ends", ends), ("axes", axes), ("steps", steps)):
        require_rank(node, name, vector, "[length]", code="node.vector_required")
    ends = assert_shape(node, ends, (count,))
    axes, steps = (None if v is None else assert_shape(node, v, (count,)) for v in (axes, steps))
    stride = [1] * count if steps is None else read_sizes(steps)
    if axes is not None and axes.constant is None:
        return _slice_at_run_time(node, data, starts, ends, axes, steps)
    axis_numbers = list(range(count)) if axes is None else read_constant_ints(node, axes, None, "axes") or []
    chosen = [normalize_axis(node, a, data.rank, "axes entry") for a in axis_numbers]
    if first is None or last is None or stride is None or not all(isinstance(s, int) for s in stride):
        return _slice_at_run_time(node, data, starts, ends, node.constant(np.array(chosen, "int64")), steps)
    return slice_axes(node, data, chosen, first, last, stride)


def slice_axes(
    node: Node, data: Value, axes: list[int], starts: list[Size], ends: list[Size], steps: list[int]
) -> Value:
    """Emit data[..., start:end:step, ...] along each axis, by ONNX's rules for negative and too large bounds."""
    begins, strides, dims = [0] * data.rank, [1] * data.rank, list(data.shape)
    for axis, start, end, step in zip(axes, starts, ends, steps):
        if step == 0:
            raise node.error("slice.step_zero", "a step of 0 is not allowed.")
        begins[axis], dims[axis] = _compute_bounds(node, data.shape[axis], start, end, step)
        strides[axis] = step
    return emit_slice(node, data, begins, strides, tuple(dims))


def emit_slice(node: Node, data: Value, begins: list[Size], strides: list[int], dims: Shape) -> Value:
    """Emit the elements begin + i * stride, i < dim, of every dimension; all of them exist."""
    is_whole = all(node.symbols.equal(d, e) for d, e in zip(dims, data.shape))
    if is_whole and all(s == 1 for s in strides):
        return data
    if can_fold_contents(data) and fits_contents(dims) and all(isinstance(b, int) for b in begins):
        assert data.contents is not None
        indices = [np.arange(d) * s + b for b, d, s in zip(begins, dims, strides)]
        return fold_contents(node, data, data.contents[np.ix_(*indices)])

    (data,), order, back = unify_layouts(node, data)
    begins, strides, dims = [begins[a] for a in order], [strides[a] for a in order], tuple(dims[a] for a in order)

    def element(index: Any, x: Any, *first: Any) -> Any:
        return x(*(b + i * s for b, i, s in zip(first, index, strides)))

    return back(compute(node, "slice", element, [data], dims, begins))


def _compute_bounds(node: Node, dim: Size, start: Size, end: Size, step: int) -> tuple[Size, Size]:
    """Return the first index and the length of start:end:step in a dimension."""
    if step > 0:
        low, high = _clamp(node, start, dim, 0, dim), _clamp(node, end, dim, 0, dim)
        span = high - low
    else:
        low, high = _clamp(node, start, dim, 0, dim - 1), _clamp(node, end, dim, -1, dim - 1)
        low = _minimum(node, low, dim - 1)  # -1 where the slice is empty
        span = low - high
    length = node.simplify(ceil_divide(clamp_nonnegative(node, node.simplify(span)), abs(step)))
    return node.simplify(low), length


def _clamp(node: Node, bound: Size, dim: Size, low: Size, high: Size) -> Size:
    """Return the bound, counted from the end where negative, clamped to [low, high]."""
    if isinstance(bound, int):
        bound = max(-_MAX_BOUND, min(bound, _MAX_BOUND))
    prove = node.symbols.prove
    if prove(bound >= 0):
        return _minimum(node, bound, high)
    if prove(bound < 0):
        return _maximum(node, node.simplify(bound + dim), low)
    wrapped = tirx.Select(bound < 0, bound + dim, bound)
    return symbolic.minimum(symbolic.maximum(wrapped, low), high)


def _minimum(node: Node, a: Size, b: Size) -> Size:
    if node.symbols.prove(a <= b):
        return a
    return b if node.symbols.prove(b <= a) else symbolic.minimum(a, b)


def _maximum(node: Node, a: Size, b: Size) -> Size:
    if node.symbols.prove(a >= b):
        return a
    return b if node.symbols.prove(b >= a) else symbolic.maximum(a, b)


def _slice_at_run_time(node: Node, data: Value, starts: Value, ends: Value, axes: Value, steps: Value | None) -> Value:
    """Emit the slice; a kernel computes first index, step and length of the sliced dimensions."""
    rank, count = data.rank, starts.shape[0]
    if not count:
        return data
    axes = assert_in_bounds(node, axes, rank, bound_name=f"the rank of {node.describe(data, False)}")
    steps = node.constant(np.ones(count, "int64")) if steps is None else steps
    inputs = [node.emit(relax.op.astype(node.tensor(v), "int64")) for v in (starts, ends, axes, steps)]
    static_axes = None if axes.constant is None else {int(a) for a in axes.constant}
    sliced_axes = [k for k in range(rank) if static_axes is None or k in static_axes]

    def bounds(first: Any, last: Any, axis: Any, stride: Any) -> list[Any]:
        begins, strides, lengths = [], [], []
        far = tirx.IntImm("int64", _MAX_BOUND)
        for j in range(count):
            with T.Assert(stride[j] != 0, f"[slice.step_zero] {node.where}: input steps holds 0.", "ValueError"):
                pass
        # Clipped beyond any dimension: adding to a step does not wrap.
        steps = [T.bind(tirx.max(tirx.min(stride[j], far), -far)) for j in range(count)]
        for k in sliced_axes:
            dim = data.shape[k] * tirx.IntImm("int64", 1)
            begin, step, length = tirx.IntImm("int64", 0), tirx.IntImm("int64", 1), dim
            for j in range(count):
                is_axis = T.bind(tirx.floormod(axis[j], rank) == k)
                b, n = (T.bind(v) for v in _compute_runtime_bounds(dim, first[j], last[j], steps[j]))
                begin, step, length = (
                    T.bind(tirx.Select(is_axis, new, old)) for new, old in ((b, begin), (steps[j], step), (n, length))
                )
            begins.append(begin)
            strides.append(step)
            lengths.append(length)
        return begins + strides + lengths

    table = compute_sizes(node, "slice_bounds", 3 * len(sliced_axes), bounds, inputs, data.shape)
    lengths = slice_axes(node, table, [0], [2 * len(sliced_axes)], [3 * len(sliced_axes)], [1])
    dims: list[Size] = list(data.shape)
    for k, symbol in zip(sliced_axes, bind_sizes(node, lengths)):
        dims[k] = symbol

    def element(index: Any, x: Any, entry: Any) -> Any:
        position = list(index)
        for j, k in enumerate(sliced_axes):
            position[k] = entry(j) + index[k] * entry(len(sliced_axes) + j)
        return x(*position)

    return compute(node, "slice", element, [data, table], tuple(dims))


def _compute_runtime_bounds(dim: Any, start: Any, end: Any, step: Any) -> tuple[Any, Any]:
    zero = tirx.IntImm("int64", 0)
    forward = step > 0
    lowest, highest = tirx.Select(forward, zero, zero - 1), tirx.Select(forward, dim, dim - 1)

    def clamp(bound: Any, low: Any) -> Any:
        return tirx.min(tirx.max(tirx.Select(bound < 0, bound + dim, bound), low), highest)

    low, high = T.bind(clamp(start, zero)), T.bind(clamp(end, lowest))
    up, down = tirx.floordiv(high - low + step - 1, step), tirx.floordiv(low - high - step - 1, zero - step)
    length = tirx.if_then_else(forward, up, tirx.if_then_else(step < 0, down, zero))
    return low, tirx.max(length, zero)
