"""Reductions: ONNX ReduceSum, ReduceMean, ReduceMax, ReduceL2, ReduceLogSumExp and similar operators.

Axes come from an attribute (older versions), from a constant input, or from an input that is only available at run
time. In the last case each axis is both preserved and reduced, with sizes (1, n) or (n, 1) bound at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx

from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds
from ..helpers.channels import unify_layouts
from ..helpers.compute import (
    MAXIMUM,
    MINIMUM,
    PRODUCT,
    SUM,
    Element,
    Extent,
    Reducer,
    dtype_of,
    is_float,
    reduce_axes,
    require_numbers,
    widen_dtype,
)
from ..helpers.contents import normalize_axis
from ..helpers.requirements import read_length
from ..helpers.run_time import bind_sizes, compute_sizes
from ..tensor.reshape import reshape_to


@dataclass(frozen=True)
class _ReductionSpace:
    """The operand of a reduction: element(*index) over the axes of an index space."""

    shape: Sequence[Extent]
    axes: Sequence[int]
    element: Callable[..., Element]

    @property
    def count(self) -> Element:
        """Return how many elements are combined into one."""
        return functools.reduce(lambda n, axis: n * self.shape[axis], self.axes, tirx.const(1, "int64"))

    def combine_elements(self, reducer: Reducer, element: Callable[..., Element]) -> te.Tensor:
        return reduce_axes(self.shape, self.axes, reducer, element, "reduced")

    def at(self, tensor: te.Tensor, index: Sequence[Element]) -> Element:
        """Return the element of a combined tensor that covers an index of the space."""
        return tensor(*(tirx.const(0, "int64") if axis in self.axes else i for axis, i in enumerate(index)))


ReductionStage = tuple[te.Tensor, Element]  # a combined tensor, and its value where nothing is combined


@dataclass(frozen=True)
class _Reduction:
    """A reduction: stages(space) combines, finish(count, *elements) computes the result from it.

    contents is the same function on two sizes. Where real is set, integers are computed in float64.
    """

    stages: Callable[[_ReductionSpace], Sequence[ReductionStage]]
    finish: Callable[..., Element] = lambda _, x: x
    contents: Callable[[Size, Size], Size] | None = None
    real: bool = False


def _make_combine(
    reducer: Reducer, prepare: Callable[[Element], Element] = lambda x: x
) -> Callable[[_ReductionSpace], Sequence[ReductionStage]]:
    """Return a stage that combines prepare(element)."""

    def stages(space: _ReductionSpace) -> Sequence[ReductionStage]:
        tensor = space.combine_elements(reducer, lambda *index: prepare(space.element(*index)))
        return [(tensor, reducer.identity(str(tensor.dtype)))]

    return stages


def _combine_exponentials(space: _ReductionSpace) -> Sequence[ReductionStage]:
    """Return the largest x, or 0 where it is infinite, as m, and the sum of e^(x - m)."""
    peak = space.combine_elements(MAXIMUM, space.element)
    zero, infinity = tirx.const(0.0, peak.dtype), tirx.infinity(peak.dtype)
    m = te.compute(peak.shape, lambda *i: tirx.Select(tirx.abs(peak(*i)) == infinity, zero, peak(*i)), name="m")
    s = space.combine_elements(SUM, lambda *index: tirx.exp(space.element(*index) - space.at(m, index)))
    return [(m, zero), (s, zero)]


def _divide(count: Element, x: Element) -> Element:
    if is_float(dtype_of(x)):
        return x / count.astype(x.ty.dtype)
    return tirx.truncdiv(x, tirx.max(count, 1).astype(x.ty.dtype))  # the processor traps on a division by 0


def _square(x: Element) -> Element:
    return x * x


def _magnitude(x: Element) -> Element:
    return x if dtype_of(x).startswith("uint") else tirx.Select(x < 0, -x, x)


_REDUCTIONS = {
    "ReduceSum": _Reduction(_make_combine(SUM), contents=symbolic.add),
    "ReduceMean": _Reduction(_make_combine(SUM), finish=_divide),
    "ReduceMax": _Reduction(_make_combine(MAXIMUM), contents=symbolic.maximum),
    "ReduceMin": _Reduction(_make_combine(MINIMUM), contents=symbolic.minimum),
    "ReduceProd": _Reduction(_make_combine(PRODUCT), contents=symbolic.multiply),
    "ReduceL1": _Reduction(_make_combine(SUM, _magnitude)),
    "ReduceL2": _Reduction(_make_combine(SUM, _square), finish=lambda _, x: tirx.sqrt(x), real=True),
    "ReduceSumSquare": _Reduction(_make_combine(SUM, _square)),
    "ReduceLogSum": _Reduction(_make_combine(SUM), finish=lambda _, x: tirx.log(x), real=True),
    "ReduceLogSumExp": _Reduction(_combine_exponentials, finish=lambda _, m, s: m + tirx.log(s), real=True),
}


def _register(name: str, reduction: _Reduction) -> None:
    @op(name, since=1)
    def lower(node: Node, data: Value, axes: Value | None = None) -> Value:
        return _lower(node, reduction, data, axes)


for _name, _reduction in _REDUCTIONS.items():
    _register(_name, _reduction)


def _lower(node: Node, reduction: _Reduction, data: Value, axes: Value | None) -> Value:
    require_numbers(node, data)
    keepdims = bool(node.attr("keepdims", 1))
    chosen = _read_static_axes(node, data, axes)
    if chosen is None:
        assert axes is not None
        return _reduce_runtime_axes(node, reduction, data, axes, keepdims)
    if reduction.contents is not None:
        folded = symbolic.reduce(node, reduction.contents, data, chosen, keepdims)
        if folded is not None:
            return folded

    (stored,), order, back = unify_layouts(node, data)
    if not keepdims:
        remaining, back = [axis for axis in order if axis not in chosen], lambda result: result
        stored, order = (stored, order) if remaining == sorted(remaining) else (data, sorted(order))
    positions = [position for position, axis in enumerate(order) if axis in chosen]

    def compute(x: te.Tensor) -> te.Tensor:
        space = _ReductionSpace(
            x.shape, positions, lambda *index: x(*index).astype(_choose_acc_dtype(reduction, data.dtype))
        )
        result_axes = [axis for axis in range(data.rank) if keepdims or axis not in positions]
        return _compute_reduction(reduction, space, result_axes, data.dtype)

    return back(node.emit_te(compute, node.tensor(stored), primfunc_name_hint=node.op_type.lower()))


def _read_static_axes(node: Node, data: Value, axes: Value | None) -> list[int] | None:
    """Return the axes, counted from the front, or None if they are dynamic."""
    axis_numbers = node.attr("axes", None)
    if axes is not None and axes.shape != (0,):
        if axes.constant is None:
            return None
        axis_numbers = [int(axis) for axis in axes.constant.flat]
    if not axis_numbers:
        return [] if node.attr("noop_with_empty_axes", 0) else list(range(data.rank))
    return sorted({normalize_axis(node, axis, data.rank) for axis in axis_numbers})


def _choose_acc_dtype(reduction: _Reduction, dtype: str) -> str:
    """Return the type in which elements of dtype are reduced."""
    if dtype == "bool":
        return "uint8"
    return "float64" if reduction.real and not is_float(dtype) else widen_dtype(dtype)


def _compute_reduction(
    reduction: _Reduction, space: _ReductionSpace, result_axes: Sequence[int], dtype: str
) -> te.Tensor:
    """Return the reduction over the space.

    The result has the axes in result_axes; those that are reduced have size 1.
    """
    stages = reduction.stages(space)
    full = stages[0][0].shape

    def finished(*index: Element) -> Element:
        index_by_axis = dict(zip(result_axes, index))
        full_index = [index_by_axis.get(axis, tirx.const(0, "int64")) for axis in range(len(full))]
        combined = [tirx.Select(space.count == 0, identity, tensor(*full_index)) for tensor, identity in stages]
        return reduction.finish(space.count, *combined).astype(dtype)

    return te.compute([full[axis] for axis in result_axes], finished, name="finished")


def _reduce_runtime_axes(node: Node, reduction: _Reduction, data: Value, axes: Value, keepdims: bool) -> Value:
    """Reduce over axes that are input data.

    result[i] combines x[i + k] over k, where i or k is always 0.
    """
    rank = data.rank
    read_length(node, "axes", axes)

    def sizes(chosen: tirx.Buffer) -> list[Element]:
        reduces = [_contains(chosen, axes.shape[0], axis, rank) for axis in range(rank)]
        dims = [tirx.IntImm("int64", d) if isinstance(d, int) else d for d in data.shape]
        outer = [tirx.Select(r, tirx.const(1, "int64"), d) for r, d in zip(reduces, dims)]
        inner = [tirx.Select(r, d, tirx.const(1, "int64")) for r, d in zip(reduces, dims)]
        return [*outer, *inner, *(_find_remaining_size(reduces, dims, k) for k in range(rank - axes.shape[0]))]

    count = 3 * rank - axes.shape[0]
    axes = assert_in_bounds(node, axes, rank, bound_name=f"the rank of {node.describe(data, False)}")
    symbols = bind_sizes(node, compute_sizes(node, "reduced_sizes", count, sizes, [axes], data.shape))
    outer, inner, pruned = symbols[:rank], symbols[rank : 2 * rank], symbols[2 * rank :]

    def compute(x: te.Tensor, outer: Sequence[Extent], inner: Sequence[Extent]) -> te.Tensor:
        def element(*index: Element) -> Element:
            position = [i + k for i, k in zip(index[:rank], index[rank:])]
            return x(*position).astype(_choose_acc_dtype(reduction, data.dtype))

        space = _ReductionSpace([*outer, *inner], range(rank, 2 * rank), element)
        return _compute_reduction(reduction, space, range(rank), data.dtype)

    args = node.tensor(data), node.shape_expr(outer), node.shape_expr(inner)
    # Opaque: TVM 0.27 fails to fuse a reduction whose sizes are scalar parameters.
    attributes = {"op_pattern": 8}
    result = node.emit_te(compute, *args, primfunc_name_hint=node.op_type.lower(), primfunc_attrs=attributes)
    if keepdims:
        return result
    return reshape_to(node, result, tuple(pruned))


def _contains(axes: tirx.Buffer, count: int, axis: int, rank: int) -> Element:
    return tirx.any(*(tirx.any(axes[k] == axis, axes[k] == axis - rank) for k in range(count)))


def _find_remaining_size(reduces: Sequence[Element], dims: Sequence[Element], k: int) -> Element:
    """Return the size of the k-th axis that is not reduced."""
    size, before = tirx.const(0, "int64"), tirx.const(0, "int64")
    for reduced_axis, dim in zip(reduces, dims):
        size = tirx.Select(tirx.all(tirx.Not(reduced_axis), before == k), dim, size)
        before = before + tirx.Select(reduced_axis, tirx.const(0, "int64"), tirx.const(1, "int64"))
    return size
