"""Operators that depend on the order or zeros of elements: TopK, ArgMax, ArgMin, NonZero, Compress, CumSum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, prod, storage_dtype
from ...tensorir.along_rows import ATTRIBUTE, RunningSum, Top, is_less, to_json
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, require
from ..helpers.compute import MAXIMUM, MINIMUM, Reducer, is_float, read_element
from ..helpers.contents import normalize_axis, read_sizes
from ..helpers.kernels import compute, emit_loops, grid, serial
from ..helpers.requirements import require_rank
from ..helpers.run_time import bind_sizes
from .gather import wrap_index
from .reshape import reshape_to

_INT64 = "int64"
_MAX_INSERTED = 32  # elements of a row that are sorted by insertion; each inserted element moves half of them


def _is_nan(x: Any) -> Any:
    return tirx.isnan(x.astype("float64"))


def _to_rows(node: Node, data: Value, axis: int) -> Value:
    """Return the data as [outer, n, inner], n being the axis."""
    if storage_dtype(data.dtype) != data.dtype:
        raise node.error(
            "node.dtype_not_ordered",
            f"elements of type {data.dtype} have no order.",
            "Cast them to an ordinary number type.",
        )
    shape = (prod(data.shape[:axis]), data.shape[axis], prod(data.shape[axis + 1 :]))
    return reshape_to(node, data, tuple(node.simplify(d) for d in shape))


# -- sorting ----------------------------------------------------------------------------------------------------------


@op("TopK", since=1)
def top_k_1(node: Node, data: Value) -> tuple[Value, ...]:
    return _emit_top_k(node, data, node.attr("k"))


@op("TopK", since=10)
def top_k(node: Node, data: Value, k: Value) -> tuple[Value, ...]:
    count = read_sizes(k)
    return _emit_top_k(
        node, data, bind_sizes(node, reshape_to(node, k, (1,)), source=k)[0] if count is None else count[0]
    )


def _emit_top_k(node: Node, data: Value, k: Size) -> tuple[Value, ...]:
    """Emit the values and indices of each row, sorted stably.

    A few elements are sorted by insertion of candidates that are better than the last of them, which most elements are
    not. Otherwise rows are sorted by merging.
    """
    axis, top = normalize_axis(node, node.attr("axis", -1), data.rank), Top(bool(node.attr("largest", 1)))
    rows = _to_rows(node, data, axis)
    outer, n, inner = rows.shape
    fits = symbolic.logical_and(symbolic.less_or_equal(0, k), symbolic.less_or_equal(k, n))
    rows = require(
        node, rows, fits, "top_k.k_out_of_range", f"k is {{}}, and dimension {axis} has {{}} elements.", k, n
    )

    def statements(x: Any, values: Any, indices: Any, order: Any, *scratch_buffers: Any) -> None:
        *merged, cursor = scratch_buffers
        with serial(outer) as o, serial(inner) as j:

            def before(a: Any, b: Any) -> Any:
                a, b = x[o, a, j], x[o, b, j]
                return is_less(b, a) if top.largest else is_less(a, b)

            if isinstance(k, int) and k <= _MAX_INSERTED:
                _emit_insertion_sort(order, cursor, n, k, before)
            else:
                _emit_merge_sort(order, merged[0], cursor, n, before)
            with serial(k) as i:
                T.buffer_store(indices, order[i], [o, i, j])
                T.buffer_store(values, x[o, order[i], j], [o, i, j])

    shape = (outer, k, inner)
    scratch: list[tuple[Shape, str]] = [((n,), _INT64), ((n,), _INT64), ((3,), _INT64)]
    if isinstance(k, int) and k <= _MAX_INSERTED:
        scratch = [((max(k, 1),), _INT64), ((1,), _INT64)]
    output_types, attributes = [(shape, data.dtype), (shape, _INT64)], {ATTRIBUTE: to_json(top)}
    results = emit_loops(node, "top_k", statements, [rows], output_types, [k], scratch, attributes)
    final = (*data.shape[:axis], k, *data.shape[axis + 1 :])
    return tuple(reshape_to(node, r, final) for r in results)


def _emit_insertion_sort(order: Any, cursor: Any, n: Size, k: int, before: Any) -> None:
    """Set order[0:k] to the first k of 0 to n - 1. cursor[0] is the position of the next one."""
    with serial(n if k else 0) as i:
        yes, no = tirx.const(True, "bool"), tirx.const(False, "bool")
        with T.If(tirx.if_then_else(i < k, yes, before(i, order[k - 1]))), T.Then():
            T.buffer_store(cursor, tirx.min(i, k - 1), [0])
            with T.While(tirx.if_then_else(cursor[0] > 0, before(i, order[cursor[0] - 1]), no)):
                T.buffer_store(order, order[cursor[0] - 1], [cursor[0]])
                T.buffer_store(cursor, cursor[0] - 1, [0])
            T.buffer_store(order, i, [cursor[0]])


def _emit_merge_sort(order: Any, merged: Any, cursor: Any, n: Size, before: Any) -> None:
    """Set order[0:n] to 0 to n - 1 in their order.

    Scratch: merged, and cursor, which contains the width of the sorted runs and the heads of the two current ones.
    """
    with serial(n) as i:
        T.buffer_store(order, i, [i])
    T.buffer_store(cursor, tirx.IntImm(_INT64, 1), [0])
    with T.While(cursor[0] < n):
        width = T.bind(cursor[0])
        with serial(tirx.floordiv(n + 2 * width - 1, 2 * width)) as run:
            low = T.bind(run * 2 * width)
            middle, high = T.bind(tirx.min(low + width, n)), T.bind(tirx.min(low + 2 * width, n))
            T.buffer_store(cursor, low, [1])
            T.buffer_store(cursor, middle, [2])
            with serial(high - low) as i:
                left, right = T.bind(cursor[1]), T.bind(cursor[2])
                no, yes = tirx.const(False, "bool"), tirx.const(True, "bool")
                later_first = tirx.if_then_else(right < high, before(order[right], order[left]), no)
                take_right = T.bind(tirx.if_then_else(left < middle, later_first, yes))
                T.buffer_store(merged, tirx.if_then_else(take_right, order[right], order[left]), [low + i])
                T.buffer_store(cursor, tirx.Select(take_right, left, left + 1), [1])
                T.buffer_store(cursor, tirx.Select(take_right, right + 1, right), [2])
        with serial(n) as i:
            T.buffer_store(order, merged[i], [i])
        T.buffer_store(cursor, 2 * width, [0])


@op("ArgMax", since=1)
def arg_max(node: Node, data: Value) -> Value:
    return _emit_arg(node, data, MAXIMUM)


@op("ArgMin", since=1)
def arg_min(node: Node, data: Value) -> Value:
    return _emit_arg(node, data, MINIMUM)


def _emit_arg(node: Node, data: Value, extreme: Reducer) -> Value:
    """Emit the index of the first or last best element along an axis.

    NaN is better than all numbers, as in NumPy. These are two reductions: that of the elements, and that of the indices
    of those that equal it. The schedule rules for reductions apply to both.
    """
    axis, last = normalize_axis(node, node.attr("axis", 0), data.rank), bool(node.attr("select_last_index", 0))
    rows = _to_rows(node, data, axis)
    rows = require(
        node,
        rows,
        symbolic.less(0, rows.shape[1]),
        "node.dimension_empty",
        f"dimension {axis} is empty, and has no largest or smallest element.",
    )

    def kernel(x: te.Tensor) -> te.Tensor:
        outer, n, inner = x.shape
        none = tirx.IntImm(_INT64, -1) if last else n * tirx.IntImm(_INT64, 1)

        def reduce_axis(reducer: Reducer, element: Callable[..., Any], name: str) -> te.Tensor:
            i = te.reduce_axis((0, n), "i")
            return te.compute((outer, inner), lambda o, j: reducer.combine(element(o, i.var, j), axis=i), name=name)

        best = reduce_axis(extreme, lambda *index: read_element(x, index), "best")

        def select_index(o: Any, i: Any, j: Any) -> Any:
            element = read_element(x, (o, i, j))
            is_best = element == best(o, j)
            if is_float(data.dtype):
                is_best = tirx.Or(is_best, tirx.isnan(element))
            return tirx.Select(is_best, i, none)

        return reduce_axis(MAXIMUM if last else MINIMUM, select_index, "arg")

    result = node.emit_te(kernel, node.tensor(rows), dtype=_INT64, primfunc_name_hint="arg")
    reduced_dims = (1,) if node.attr("keepdims", 1) else ()
    return reshape_to(node, result, (*data.shape[:axis], *reduced_dims, *data.shape[axis + 1 :]))


# -- elements that are not zero ---------------------------------------------------------------------------------------


@op("NonZero", since=9)
def non_zero(node: Node, data: Value) -> Value:
    if storage_dtype(data.dtype) != data.dtype:
        raise node.error(
            "non_zero.dtype_unsupported",
            f"elements of type {data.dtype} cannot be compared with zero.",
            "Cast them first.",
        )

    def is_nonzero(element: Any) -> Any:
        if data.dtype == "bool":
            return element
        # TVM's != is false for NaN.
        differs = element != tirx.const(0, data.dtype)
        return tirx.Or(differs, _is_nan(element)) if "float" in data.dtype else differs

    def count(x: Any, out: Any) -> None:
        T.buffer_store(out, tirx.IntImm(_INT64, 0), [0])
        with grid(x.shape) as index:
            T.buffer_store(out, out[0] + is_nonzero(x[index]).astype(_INT64), [0])

    def fill(x: Any, out: Any, position: Any) -> None:
        T.buffer_store(position, tirx.IntImm(_INT64, 0), [0])
        with grid(x.shape) as index, T.If(is_nonzero(x[index])), T.Then():
            for k, i in enumerate(index):
                T.buffer_store(out, i, [k, position[0]])
            T.buffer_store(position, position[0] + 1, [0])

    (total,) = emit_loops(node, "count_nonzero", count, [data], [((1,), _INT64)])
    (count_symbol,) = bind_sizes(node, total)
    (result,) = emit_loops(
        node, "nonzero", fill, [data], [((data.rank, count_symbol), _INT64)], scratch=[((1,), _INT64)]
    )
    return result


@op("Compress", since=9)
def compress(node: Node, data: Value, condition: Value) -> Value:
    axis = node.attr("axis", None)
    if axis is None:
        data, axis = reshape_to(node, data, (prod(data.shape),)), 0
    axis = normalize_axis(node, axis, data.rank)
    require_rank(node, "condition", condition, "[length]", code="node.vector_required")
    count, size = condition.shape[0], data.shape[axis]
    text = f"input condition has {{}} elements, for dimension {axis}, which has {{}}."
    condition = require(
        node, condition, symbolic.less_or_equal(count, size), "compress.condition_too_long", text, count, size
    )
    indices = non_zero(node, condition)
    shape = (*data.shape[:axis], indices.shape[1], *data.shape[axis + 1 :])

    def element(index: Any, x: Any, positions: Any, size: Any) -> Any:
        return x(*index[:axis], wrap_index(positions(0, index[axis]), size), *index[axis + 1 :])

    return compute(node, "compress", element, [data, indices], shape, [data.shape[axis]])


# -- cumulative operators ---------------------------------------------------------------------------------------------


@op("CumSum", since=11)
def cum_sum(node: Node, data: Value, axis: Value) -> Value:
    return _emit_running(node, data, axis, lambda a, b: a + b, 0, is_sum=True)


@op("CumProd", since=26)
def cum_prod(node: Node, data: Value, axis: Value) -> Value:
    return _emit_running(node, data, axis, lambda a, b: a * b, 1, is_sum=False)


def _emit_running(
    node: Node, data: Value, axis: Value, combine: Callable[[Any, Any], Any], identity: int, is_sum: bool
) -> Value:
    """Emit the cumulative combination of all elements before each one.

    An element itself is included unless attribute exclusive is set. identity is the combination of no elements. is_sum
    makes schedule rules recognize a cumulative sum.
    """
    if storage_dtype(data.dtype) != data.dtype or data.dtype == "bool":
        raise node.error(
            "node.dtype_not_arithmetic",
            f"elements of type {data.dtype} cannot be added or multiplied.",
            "Cast them to an ordinary number type.",
        )
    record = RunningSum(bool(node.attr("exclusive", 0)), bool(node.attr("reverse", 0)))
    is_static, rest, attributes = axis.constant is not None, [], {}
    if axis.constant is not None:
        rows = _to_rows(node, data, normalize_axis(node, int(np.ravel(axis.constant)[0]), data.rank))
        attributes = {ATTRIBUTE: to_json(record)} if is_sum else {}
    else:
        rows = reshape_to(node, data, (prod(data.shape),))
        axis = assert_in_bounds(node, axis, data.rank, bound_name=f"the rank of {node.describe(data, False)}")
        rest = [node.emit(relax.op.astype(node.tensor(reshape_to(node, axis, ())), _INT64))]

    def statements(x: Any, *buffers: Any) -> None:
        out = buffers[-1]
        outer, n, inner = x.shape if is_static else _split_at(data.shape, buffers[0][()])

        def locate(o: Any, i: Any, j: Any) -> list[Any]:
            return [o, i, j] if is_static else [(o * n + i) * inner + j]

        with serial(outer) as o, serial(n) as step, serial(inner) as j:
            i = n - 1 - step if record.reverse else step
            before = locate(o, i + 1 if record.reverse else i - 1, j)
            operand = x[tuple(before if record.exclusive else locate(o, i, j))]
            start = tirx.const(identity, data.dtype) if record.exclusive else operand
            T.buffer_store(
                out, tirx.if_then_else(step == 0, start, combine(out[tuple(before)], operand)), locate(o, i, j)
            )

    outputs = [(rows.shape, data.dtype)]
    (result,) = emit_loops(node, "running", statements, [rows, *rest], outputs, data.shape, attributes=attributes)
    return reshape_to(node, result, data.shape)


def _split_at(shape: Shape, axis: Any) -> tuple[Any, Any, Any]:
    """Return the number of elements before, along and after an axis that is dynamic."""
    axis, unit = T.bind(tirx.floormod(axis, len(shape))), tirx.IntImm(_INT64, 1)
    outer, n, inner = unit, unit, unit
    for k, size in enumerate(shape):
        outer, inner = (
            outer * tirx.Select(axis > k, size * unit, unit),
            inner * tirx.Select(axis < k, size * unit, unit),
        )
        n = tirx.Select(axis == k, size * unit, n)
    return T.bind(outer), T.bind(n), T.bind(inner)
