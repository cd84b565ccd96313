"""Reductions: ONNX ReduceSum, ReduceMean, ReduceMax, ReduceL2, ReduceLogSumExp and their kin.

Axes come from an attribute (older versions), from a constant input, or from an input known at run time only: then each
axis is both kept and reduced, with sizes (1, n) or (n, 1) that the run decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx

from ..importing import symbolic
from ..importing.channels import as_computed
from ..importing.compute import (
    Element,
    Extent,
    Reducer,
    dtype_of,
    is_float,
    largest,
    prod,
    reduced,
    require_numbers,
    smallest,
    total,
    widened,
)
from ..importing.node import Node
from ..importing.values import Size, Value
from . import op
from .asserted import inside
from .contents import static_axis
from .reshape import reshape_to
from .run_time import bind, compute_sizes


@dataclass(frozen=True)
class _Space:
    """What a kernel reduces: element(*index) over the axes of an index space."""

    shape: Sequence[Extent]
    axes: Sequence[int]
    element: Callable[..., Element]

    @property
    def count(self) -> Element:
        """How many elements become one."""
        return functools.reduce(lambda n, axis: n * self.shape[axis], self.axes, tirx.const(1, "int64"))

    def combined(self, reducer: Reducer, element: Callable[..., Element]) -> te.Tensor:
        return reduced(self.shape, self.axes, reducer, element, "reduced")

    def at(self, tensor: te.Tensor, index: Sequence[Element]) -> Element:
        """The element of a combined tensor that covers an index of the space."""
        return tensor(*(tirx.const(0, "int64") if axis in self.axes else i for axis, i in enumerate(index)))


Stage = tuple[te.Tensor, Element]  # a combined tensor, and what it holds where nothing is combined


@dataclass(frozen=True)
class _Reduction:
    """stages(space) combines, finish(count, *elements) makes the result of it.

    contents is the same function on two sizes. Where real is set integers are computed in float64.
    """

    stages: Callable[[_Space], Sequence[Stage]]
    finish: Callable[..., Element] = lambda _, x: x
    contents: Callable[[Size, Size], Size] | None = None
    real: bool = False


def _combine(
    reducer: Reducer, prepare: Callable[[Element], Element] = lambda x: x
) -> Callable[[_Space], Sequence[Stage]]:
    """prepare(element), combined."""

    def stages(space: _Space) -> Sequence[Stage]:
        tensor = space.combined(reducer, lambda *index: prepare(space.element(*index)))
        return [(tensor, reducer.identity(str(tensor.dtype)))]

    return stages


def _exponentials(space: _Space) -> Sequence[Stage]:
    """The largest x, or 0 where that is infinite, as m; the sum of e^(x - m)."""
    peak = space.combined(largest, space.element)
    zero, infinity = tirx.const(0.0, peak.dtype), tirx.infinity(peak.dtype)
    m = te.compute(peak.shape, lambda *i: tirx.Select(tirx.abs(peak(*i)) == infinity, zero, peak(*i)), name="m")
    s = space.combined(total, lambda *index: tirx.exp(space.element(*index) - space.at(m, index)))
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
    "ReduceSum": _Reduction(_combine(total), contents=symbolic.add),
    "ReduceMean": _Reduction(_combine(total), finish=_divide),
    "ReduceMax": _Reduction(_combine(largest), contents=symbolic.maximum),
    "ReduceMin": _Reduction(_combine(smallest), contents=symbolic.minimum),
    "ReduceProd": _Reduction(_combine(prod), contents=symbolic.multiply),
    "ReduceL1": _Reduction(_combine(total, _magnitude)),
    "ReduceL2": _Reduction(_combine(total, _square), finish=lambda _, x: tirx.sqrt(x), real=True),
    "ReduceSumSquare": _Reduction(_combine(total, _square)),
    "ReduceLogSum": _Reduction(_combine(total), finish=lambda _, x: tirx.log(x), real=True),
    "ReduceLogSumExp": _Reduction(_exponentials, finish=lambda _, m, s: m + tirx.log(s), real=True),
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
    chosen = _static_axes(node, data, axes)
    if chosen is None:
        assert axes is not None
        return _at_run_time(node, reduction, data, axes, keepdims)
    if reduction.contents is not None:
        known = symbolic.reduce(node, reduction.contents, data, chosen, keepdims)
        if known is not None:
            return known

    (stored,), order, back = as_computed(node, data)
    if not keepdims:
        left, back = [axis for axis in order if axis not in chosen], lambda result: result
        stored, order = (stored, order) if left == sorted(left) else (data, sorted(order))
    places = [place for place, axis in enumerate(order) if axis in chosen]

    def compute(x: te.Tensor) -> te.Tensor:
        space = _Space(x.shape, places, lambda *index: x(*index).astype(_inside(reduction, data.dtype)))
        kept = [axis for axis in range(data.rank) if keepdims or axis not in places]
        return _kernel(reduction, space, kept, data.dtype)

    return back(node.emit_te(compute, node.tensor(stored), primfunc_name_hint=node.op_type.lower()))


def _static_axes(node: Node, data: Value, axes: Value | None) -> list[int] | None:
    """The axes, counted from the front, or None where only the run knows them."""
    given = node.attr("axes", None)
    if axes is not None and axes.shape != (0,):
        if axes.constant is None:
            return None
        given = [int(axis) for axis in axes.constant.flat]
    if not given:
        return [] if node.attr("noop_with_empty_axes", 0) else list(range(data.rank))
    return sorted({static_axis(node, axis, data.rank) for axis in given})


def _inside(reduction: _Reduction, dtype: str) -> str:
    """The type that elements of dtype are reduced in."""
    if dtype == "bool":
        return "uint8"
    return "float64" if reduction.real and not is_float(dtype) else widened(dtype)


def _kernel(reduction: _Reduction, space: _Space, kept: Sequence[int], dtype: str) -> te.Tensor:
    """The reduction over the space; the result has the axes in kept, where those that are reduced have size 1."""
    stages = reduction.stages(space)
    full = stages[0][0].shape

    def finished(*index: Element) -> Element:
        given = dict(zip(kept, index))
        everywhere = [given.get(axis, tirx.const(0, "int64")) for axis in range(len(full))]
        parts = [tirx.Select(space.count == 0, nothing, tensor(*everywhere)) for tensor, nothing in stages]
        return reduction.finish(space.count, *parts).astype(dtype)

    return te.compute([full[axis] for axis in kept], finished, name="finished")


def _at_run_time(node: Node, reduction: _Reduction, data: Value, axes: Value, keepdims: bool) -> Value:
    """Reduces over axes that are input data: result[i] combines x[i + k] over k, where i or k is always 0."""
    rank = data.rank
    if not isinstance(axes.shape[0], int):
        raise node.error("the number of axes is symbolic.", "Give axes a static shape, or make it a constant.")

    def sizes(chosen: tirx.Buffer) -> list[Element]:
        reduces = [_contains(chosen, axes.shape[0], axis, rank) for axis in range(rank)]
        dims = [tirx.IntImm("int64", d) if isinstance(d, int) else d for d in data.shape]
        outer = [tirx.Select(r, tirx.const(1, "int64"), d) for r, d in zip(reduces, dims)]
        inner = [tirx.Select(r, d, tirx.const(1, "int64")) for r, d in zip(reduces, dims)]
        return [*outer, *inner, *(_kept_size(reduces, dims, k) for k in range(rank - axes.shape[0]))]

    count = 3 * rank - axes.shape[0]
    axes = inside(node, axes, rank, of=f"the rank of {node.name_of(data, False)}")
    symbols = bind(node, compute_sizes(node, "reduced_sizes", count, sizes, [axes], data.shape))
    outer, inner, pruned = symbols[:rank], symbols[rank : 2 * rank], symbols[2 * rank :]

    def compute(x: te.Tensor, outer: Sequence[Extent], inner: Sequence[Extent]) -> te.Tensor:
        def element(*index: Element) -> Element:
            position = [i + k for i, k in zip(index[:rank], index[rank:])]
            return x(*position).astype(_inside(reduction, data.dtype))

        space = _Space([*outer, *inner], range(rank, 2 * rank), element)
        return _kernel(reduction, space, range(rank), data.dtype)

    args = node.tensor(data), node.shape_expr(outer), node.shape_expr(inner)
    # Opaque: TVM 0.27 fails to fuse a reduction whose sizes are scalar parameters.
    attributes = {"op_pattern": 8}
    result = node.emit_te(compute, *args, primfunc_name_hint=node.op_type.lower(), primfunc_attrs=attributes)
    if keepdims:
        return result
    return reshape_to(node, result, tuple(pruned))


def _contains(axes: tirx.Buffer, count: int, axis: int, rank: int) -> Element:
    return tirx.any(*(tirx.any(axes[k] == axis, axes[k] == axis - rank) for k in range(count)))


def _kept_size(reduces: Sequence[Element], dims: Sequence[Element], k: int) -> Element:
    """The size of the k-th axis that is not reduced."""
    size, before = tirx.const(0, "int64"), tirx.const(0, "int64")
    for reduced_axis, dim in zip(reduces, dims):
        size = tirx.Select(tirx.all(tirx.Not(reduced_axis), before == k), dim, size)
        before = before + tirx.Select(reduced_axis, tirx.const(0, "int64"), tirx.const(1, "int64"))
    return size
