"""ONNX Unique (https://onnx.ai/onnx/operators/onnx__Unique.html): distinct elements, or slices along an axis.

Rows are sorted by merging, stably, so that the first of equal ones has the smallest index. The number of distinct rows
is bound at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Value, prod
from ...tensorir.along_rows import is_less
from .. import op
from ..helpers.compute import require_numbers
from ..helpers.contents import normalize_axis
from ..helpers.kernels import compute, emit_loops, let, serial
from ..helpers.run_time import bind_sizes
from ..math.matmul import permute_axes
from .cast import cast_to
from .reshape import reshape_to
from .slice import emit_slice

_INT64 = "int64"


@op("Unique", since=11)
def unique(node: Node, data: Value) -> tuple[Value, Value, Value, Value]:
    """Emit ONNX's outputs Y, indices, inverse_indices and counts. A slice along the axis, flattened, is a row."""
    require_numbers(node, data)
    axis = node.attr("axis", None)
    if axis is None:
        data, axis = reshape_to(node, data, (prod(data.shape),)), 0
    axis = normalize_axis(node, axis, data.rank)
    shape, order = data.shape, [axis, *(a for a in range(data.rank) if a != axis)]
    width = prod(size for k, size in enumerate(shape) if k != axis)
    compared = cast_to(node, data, "uint8") if data.dtype == "bool" else data
    rows = reshape_to(node, permute_axes(node, compared, order), (shape[axis], width))
    inverse, firsts, counts, total = _number_groups(node, rows, bool(node.attr("sorted", 1)))
    (distinct,) = bind_sizes(node, total)
    firsts, counts = (emit_slice(node, vector, [0], [1], (distinct,)) for vector in (firsts, counts))

    def element(index: Any, x: Any, first: Any) -> Any:
        return x(*index[:axis], first(index[axis]), *index[axis + 1 :])

    y = compute(node, "unique", element, [data, firsts], (*shape[:axis], distinct, *shape[axis + 1 :]))
    return y, firsts, inverse, counts


def _number_groups(node: Node, rows: Value, is_sorted: bool) -> tuple[Value, ...]:
    """Return the inverse indices, first indices and counts of groups of equal rows, and the number of groups.

    If is_sorted, groups are in the order of their rows, else in the order of their first indices.
    """
    n, width = rows.shape

    def statements(x: Any, *buffers: Any) -> None:
        inverse, firsts, counts, total, order, merged, heads, differs, names = buffers

        def compare(a: Any, b: Any) -> None:
            """Set differs[0] to -1 where row a is before row b, 1 where it is after, 0 where they are equal."""
            T.buffer_store(differs, tirx.const(0, _INT64), [0])
            with serial(width) as k, T.If(differs[0] == 0), T.Then():
                is_before, is_after = (is_less(*pair) for pair in ((x[a, k], x[b, k]), (x[b, k], x[a, k])))
                sign = tirx.Select(
                    is_before, tirx.const(-1, _INT64), tirx.Select(is_after, tirx.const(1, _INT64), differs[0])
                )
                T.buffer_store(differs, sign, [0])

        _sort(order, merged, heads, differs, n, compare)
        T.buffer_store(total, tirx.const(0, _INT64), [0])
        with serial(n) as k:
            row = let(order[k])
            T.buffer_store(differs, tirx.const(1, _INT64), [0])
            with T.If(k > 0), T.Then():
                compare(row, order[tirx.max(k - 1, 0)])
            with T.If(differs[0] != 0), T.Then():
                T.buffer_store(firsts, row, [total[0]])
                T.buffer_store(counts, tirx.const(0, _INT64), [total[0]])
                T.buffer_store(total, total[0] + 1, [0])
            T.buffer_store(inverse, total[0] - 1, [row])
            T.buffer_store(counts, counts[total[0] - 1] + 1, [total[0] - 1])
        if not is_sorted:
            _renumber_groups(buffers, n, names)

    vector: tuple[Shape, str] = ((n,), _INT64)
    scalar: tuple[Shape, str] = ((1,), _INT64)
    scratch = [vector, vector, ((3,), _INT64), scalar, vector]
    return emit_loops(node, "unique_rows", statements, [rows], [vector, vector, vector, scalar], [width], scratch)


def _renumber_groups(buffers: Any, n: Any, names: Any) -> None:
    """Number groups by their first occurrence. order and merged are free here."""
    inverse, firsts, counts, _, order, merged, heads, *_ = buffers
    with serial(n) as k:
        T.buffer_store(order, firsts[k], [k])
        T.buffer_store(merged, counts[k], [k])
    T.buffer_store(heads, tirx.const(0, _INT64), [0])
    with serial(n) as k:
        group = inverse[k]
        with T.If(order[group] == k), T.Then():
            T.buffer_store(names, heads[0], [group])
            T.buffer_store(firsts, k, [heads[0]])
            T.buffer_store(counts, merged[group], [heads[0]])
            T.buffer_store(heads, heads[0] + 1, [0])
        T.buffer_store(inverse, names[group], [k])


def _sort(order: Any, merged: Any, heads: Any, differs: Any, n: Any, compare: Callable[[Any, Any], None]) -> None:
    """Set order[0:n] to the indices in the order of compare.

    heads: the width of runs, and the positions in two of them.
    """
    with serial(n) as k:
        T.buffer_store(order, k, [k])
    T.buffer_store(heads, tirx.const(1, _INT64), [0])
    with T.While(heads[0] < n):
        width = let(heads[0])
        with serial(tirx.floordiv(n + 2 * width - 1, 2 * width)) as run:
            low = let(run * 2 * width)
            middle, high = let(tirx.min(low + width, n)), let(tirx.min(low + 2 * width, n))
            T.buffer_store(heads, low, [1])
            T.buffer_store(heads, middle, [2])
            with serial(high - low) as k:
                left, right = let(heads[1]), let(heads[2])
                T.buffer_store(differs, tirx.Select(left < middle, tirx.const(0, _INT64), tirx.const(-1, _INT64)), [0])
                with T.If(tirx.all(left < middle, right < high)), T.Then():
                    compare(order[tirx.min(right, n - 1)], order[tirx.min(left, n - 1)])
                T.buffer_store(merged, order[tirx.Select(differs[0] < 0, right, left)], [low + k])
                T.buffer_store(heads, tirx.Select(differs[0] < 0, left, left + 1), [1])
                T.buffer_store(heads, tirx.Select(differs[0] < 0, right + 1, right), [2])
        with serial(n) as k:
            T.buffer_store(order, merged[k], [k])
        T.buffer_store(heads, 2 * width, [0])
