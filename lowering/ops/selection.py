"""Operators whose result depends on the order or truth of elements: TopK, ArgMax, ArgMin, NonZero, Compress, CumSum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.compute import Reducer, is_float, largest, read, smallest
from ..importing.node import Node
from ..importing.values import Shape, Size, Value, prod, storage_dtype
from ..tensorir.along_rows import ATTRIBUTE, RunningSum, Top, less, to_json
from . import op
from .asserted import inside, required
from .contents import sizes, static_axis
from .gather import wrapped
from .kernels import compute, grid, loops, serial
from .reshape import reshape_to
from .run_time import bind

_INT64 = "int64"
_FEW = 32  # elements of a row that are kept in order one by one; each that belongs to them moves half of them


def _is_nan(x: Any) -> Any:
    return tirx.isnan(x.astype("float64"))


def _rows(node: Node, data: Value, axis: int) -> Value:
    """The data as [outer, n, inner], n being the axis."""
    if storage_dtype(data.dtype) != data.dtype:
        raise node.error(f"elements of type {data.dtype} have no order.", "Cast them to an ordinary number type.")
    shape = (prod(data.shape[:axis]), data.shape[axis], prod(data.shape[axis + 1 :]))
    return reshape_to(node, data, tuple(node.simplify(d) for d in shape))


# -- sorting ----------------------------------------------------------------------------------------------------------


@op("TopK", since=1)
def top_k_1(node: Node, data: Value) -> tuple[Value, ...]:
    return _top_k(node, data, node.attr("k"))


@op("TopK", since=10)
def top_k(node: Node, data: Value, k: Value) -> tuple[Value, ...]:
    count = sizes(k)
    return _top_k(node, data, bind(node, reshape_to(node, k, (1,)), of=k)[0] if count is None else count[0])


def _top_k(node: Node, data: Value, k: Size) -> tuple[Value, ...]:
    """The indices of each row, sorted so that equal elements keep their order: of a few by insertion of what is better
    than the last of them, which most elements are not, else by merging."""
    axis, top = static_axis(node, node.attr("axis", -1), data.rank), Top(bool(node.attr("largest", 1)))
    rows = _rows(node, data, axis)
    outer, n, inner = rows.shape
    fits = symbolic.logical_and(symbolic.less_or_equal(0, k), symbolic.less_or_equal(k, n))
    rows = required(node, rows, fits, f"k is {{}}, and dimension {axis} has {{}} elements.", k, n)

    def statements(x: Any, values: Any, indices: Any, order: Any, *others: Any) -> None:
        *merged, at = others
        with serial(outer) as o, serial(inner) as j:

            def before(a: Any, b: Any) -> Any:
                a, b = x[o, a, j], x[o, b, j]
                return less(b, a) if top.largest else less(a, b)

            if isinstance(k, int) and k <= _FEW:
                _insert(order, at, n, k, before)
            else:
                _merge_sort(order, merged[0], at, n, before)
            with serial(k) as i:
                T.buffer_store(indices, order[i], [o, i, j])
                T.buffer_store(values, x[o, order[i], j], [o, i, j])

    shape = (outer, k, inner)
    scratch: list[tuple[Shape, str]] = [((n,), _INT64), ((n,), _INT64), ((3,), _INT64)]
    if isinstance(k, int) and k <= _FEW:
        scratch = [((max(k, 1),), _INT64), ((1,), _INT64)]
    made, known = [(shape, data.dtype), (shape, _INT64)], {ATTRIBUTE: to_json(top)}
    results = loops(node, "top_k", statements, [rows], made, [k], scratch, known)
    final = (*data.shape[:axis], k, *data.shape[axis + 1 :])
    return tuple(reshape_to(node, r, final) for r in results)


def _insert(order: Any, at: Any, n: Size, k: int, before: Any) -> None:
    """order[0:k] become the first k of 0 to n - 1. at[0] is where the next one goes."""
    with serial(n if k else 0) as i:
        yes, no = tirx.const(True, "bool"), tirx.const(False, "bool")
        with T.If(tirx.if_then_else(i < k, yes, before(i, order[k - 1]))), T.Then():
            T.buffer_store(at, tirx.min(i, k - 1), [0])
            with T.While(tirx.if_then_else(at[0] > 0, before(i, order[at[0] - 1]), no)):
                T.buffer_store(order, order[at[0] - 1], [at[0]])
                T.buffer_store(at, at[0] - 1, [0])
            T.buffer_store(order, i, [at[0]])


def _merge_sort(order: Any, merged: Any, at: Any, n: Size, before: Any) -> None:
    """order[0:n] become 0 to n - 1 in their order. Scratch: merged, and at, the width of the sorted runs and the heads
    of the two in hand."""
    with serial(n) as i:
        T.buffer_store(order, i, [i])
    T.buffer_store(at, tirx.IntImm(_INT64, 1), [0])
    with T.While(at[0] < n):
        width = T.bind(at[0])
        with serial(tirx.floordiv(n + 2 * width - 1, 2 * width)) as run:
            low = T.bind(run * 2 * width)
            middle, high = T.bind(tirx.min(low + width, n)), T.bind(tirx.min(low + 2 * width, n))
            T.buffer_store(at, low, [1])
            T.buffer_store(at, middle, [2])
            with serial(high - low) as i:
                left, right = T.bind(at[1]), T.bind(at[2])
                no, yes = tirx.const(False, "bool"), tirx.const(True, "bool")
                later_first = tirx.if_then_else(right < high, before(order[right], order[left]), no)
                take_right = T.bind(tirx.if_then_else(left < middle, later_first, yes))
                T.buffer_store(merged, tirx.if_then_else(take_right, order[right], order[left]), [low + i])
                T.buffer_store(at, tirx.Select(take_right, left, left + 1), [1])
                T.buffer_store(at, tirx.Select(take_right, right + 1, right), [2])
        with serial(n) as i:
            T.buffer_store(order, merged[i], [i])
        T.buffer_store(at, 2 * width, [0])


@op("ArgMax", since=1)
def arg_max(node: Node, data: Value) -> Value:
    return _arg(node, data, largest)


@op("ArgMin", since=1)
def arg_min(node: Node, data: Value) -> Value:
    return _arg(node, data, smallest)


def _arg(node: Node, data: Value, extreme: Reducer) -> Value:
    """The first, or the last, of the best elements along an axis. NaN is better than all numbers, as in NumPy.

    Two reductions, that of the elements and that of the places of those that equal it: rules for reductions take them.
    """
    axis, last = static_axis(node, node.attr("axis", 0), data.rank), bool(node.attr("select_last_index", 0))
    rows = _rows(node, data, axis)
    rows = required(
        node, rows, symbolic.less(0, rows.shape[1]), f"dimension {axis} is empty: nothing in it is the best."
    )

    def kernel(x: te.Tensor) -> te.Tensor:
        outer, n, inner = x.shape
        none = tirx.IntImm(_INT64, -1) if last else n * tirx.IntImm(_INT64, 1)

        def along(reducer: Reducer, element: Callable[..., Any], name: str) -> te.Tensor:
            i = te.reduce_axis((0, n), "i")
            return te.compute((outer, inner), lambda o, j: reducer.combine(element(o, i.var, j), axis=i), name=name)

        best = along(extreme, lambda *index: read(x, index), "best")

        def place(o: Any, i: Any, j: Any) -> Any:
            element = read(x, (o, i, j))
            is_best = element == best(o, j)
            if is_float(data.dtype):
                is_best = tirx.Or(is_best, tirx.isnan(element))
            return tirx.Select(is_best, i, none)

        return along(largest if last else smallest, place, "arg")

    result = node.emit_te(kernel, node.tensor(rows), dtype=_INT64, primfunc_name_hint="arg")
    kept = (1,) if node.attr("keepdims", 1) else ()
    return reshape_to(node, result, (*data.shape[:axis], *kept, *data.shape[axis + 1 :]))


# -- elements that are not zero ---------------------------------------------------------------------------------------


@op("NonZero", since=9)
def non_zero(node: Node, data: Value) -> Value:
    if storage_dtype(data.dtype) != data.dtype:
        raise node.error(f"elements of type {data.dtype} cannot be compared with zero.", "Cast them first.")

    def holds(element: Any) -> Any:
        if data.dtype == "bool":
            return element
        # TVM's != does not hold for NaN.
        differs = element != tirx.const(0, data.dtype)
        return tirx.Or(differs, _is_nan(element)) if "float" in data.dtype else differs

    def count(x: Any, out: Any) -> None:
        T.buffer_store(out, tirx.IntImm(_INT64, 0), [0])
        with grid(x.shape) as index:
            T.buffer_store(out, out[0] + holds(x[index]).astype(_INT64), [0])

    def fill(x: Any, out: Any, place: Any) -> None:
        T.buffer_store(place, tirx.IntImm(_INT64, 0), [0])
        with grid(x.shape) as index, T.If(holds(x[index])), T.Then():
            for k, i in enumerate(index):
                T.buffer_store(out, i, [k, place[0]])
            T.buffer_store(place, place[0] + 1, [0])

    (total,) = loops(node, "count_nonzero", count, [data], [((1,), _INT64)])
    (found,) = bind(node, total)
    (result,) = loops(node, "nonzero", fill, [data], [((data.rank, found), _INT64)], scratch=[((1,), _INT64)])
    return result


@op("Compress", since=9)
def compress(node: Node, data: Value, condition: Value) -> Value:
    axis = node.attr("axis", None)
    if axis is None:
        data, axis = reshape_to(node, data, (prod(data.shape),)), 0
    axis = static_axis(node, axis, data.rank)
    if condition.rank != 1:
        raise node.error(f"input condition has rank {condition.rank}.", "Make it a vector.")
    count, size = condition.shape[0], data.shape[axis]
    text = f"input condition has {{}} elements, for dimension {axis}, which has {{}}."
    condition = required(node, condition, symbolic.less_or_equal(count, size), text, count, size)
    places = non_zero(node, condition)
    shape = (*data.shape[:axis], places.shape[1], *data.shape[axis + 1 :])

    def element(index: Any, x: Any, at: Any, size: Any) -> Any:
        return x(*index[:axis], wrapped(at(0, index[axis]), size), *index[axis + 1 :])

    return compute(node, "compress", element, [data, places], shape, [data.shape[axis]])


# -- running sums -----------------------------------------------------------------------------------------------------


@op("CumSum", since=11)
def cum_sum(node: Node, data: Value, axis: Value) -> Value:
    return _running(node, data, axis, lambda a, b: a + b, 0, sums=True)


@op("CumProd", since=26)
def cum_prod(node: Node, data: Value, axis: Value) -> Value:
    return _running(node, data, axis, lambda a, b: a * b, 1, sums=False)


def _running(
    node: Node, data: Value, axis: Value, combine: Callable[[Any, Any], Any], nothing: int, sums: bool
) -> Value:
    """What comes of all elements before each, and of itself unless the attribute exclusive is set; nothing is what
    comes of none. sums says that rules know it as running sums."""
    if storage_dtype(data.dtype) != data.dtype or data.dtype == "bool":
        raise node.error(
            f"elements of type {data.dtype} cannot be added or multiplied.", "Cast them to an ordinary number type."
        )
    what = RunningSum(bool(node.attr("exclusive", 0)), bool(node.attr("reverse", 0)))
    known, rest, attributes = axis.constant is not None, [], {}
    if axis.constant is not None:
        given = _rows(node, data, static_axis(node, int(np.ravel(axis.constant)[0]), data.rank))
        attributes = {ATTRIBUTE: to_json(what)} if sums else {}
    else:
        given = reshape_to(node, data, (prod(data.shape),))
        axis = inside(node, axis, data.rank, of=f"the rank of {node.name_of(data, False)}")
        rest = [node.emit(relax.op.astype(node.tensor(reshape_to(node, axis, ())), _INT64))]

    def statements(x: Any, *buffers: Any) -> None:
        out = buffers[-1]
        outer, n, inner = x.shape if known else _split_at(data.shape, buffers[0][()])

        def at(o: Any, i: Any, j: Any) -> list[Any]:
            return [o, i, j] if known else [(o * n + i) * inner + j]

        with serial(outer) as o, serial(n) as step, serial(inner) as j:
            i = n - 1 - step if what.reverse else step
            before = at(o, i + 1 if what.reverse else i - 1, j)
            added = x[tuple(before if what.exclusive else at(o, i, j))]
            start = tirx.const(nothing, data.dtype) if what.exclusive else added
            T.buffer_store(out, tirx.if_then_else(step == 0, start, combine(out[tuple(before)], added)), at(o, i, j))

    outputs = [(given.shape, data.dtype)]
    (result,) = loops(node, "running", statements, [given, *rest], outputs, data.shape, attributes=attributes)
    return reshape_to(node, result, data.shape)


def _split_at(shape: Shape, axis: Any) -> tuple[Any, Any, Any]:
    """The number of elements before, along and after an axis that is known at run time only."""
    axis, one = T.bind(tirx.floormod(axis, len(shape))), tirx.IntImm(_INT64, 1)
    outer, n, inner = one, one, one
    for k, size in enumerate(shape):
        outer, inner = outer * tirx.Select(axis > k, size * one, one), inner * tirx.Select(axis < k, size * one, one)
        n = tirx.Select(axis == k, size * one, n)
    return T.bind(outer), T.bind(n), T.bind(inner)
