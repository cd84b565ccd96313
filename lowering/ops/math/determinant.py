"""ONNX Det: determinants of [..., M, M] (https://onnx.ai/onnx/operators/onnx__Det.html).

They are computed by elimination with the largest element of each column as its pivot.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.compute import is_float, require_numbers, widen_dtype
from ..helpers.kernels import emit_loops, grid, let, serial


def require_square(node: Node, x: Value) -> Value:
    """Return x [..., M, M] float, with its last two sizes proved or asserted to be equal.

    Raises:
        NodeError: It has another element type, fewer dimensions, or two static sizes that differ.
    """
    require_numbers(node, x)
    if x.rank < 2 or not is_float(x.dtype):
        raise node.error(
            "det.input_unsupported",
            f"X is {x.dtype} of rank {x.rank}.",
            "Give it a float type and the shape [..., M, M].",
        )
    rows = next((size for size in x.shape[-2:] if isinstance(size, int)), x.shape[-1])
    return assert_shape(node, x, (*x.shape[:-2], rows, rows))


@op("Det", since=11)
def det(node: Node, x: Value) -> Value:
    x = require_square(node, x)
    dtype, size = widen_dtype(x.dtype), x.shape[-1]
    zero, one = tirx.const(0, dtype), tirx.const(1, dtype)

    def statements(x: Any, y: Any, left: Any, determinant: Any, best: Any) -> None:
        def swap_rows(column: Any, row: Any) -> None:
            """Swap a row and the row with the column's number, from that column on."""
            with serial(size - column) as k:
                saved = let(left[column, column + k])
                T.buffer_store(left, left[row, column + k], [column, column + k])
                T.buffer_store(left, saved, [row, column + k])

        with independent_loops(*x.shape[:-2]) as outer:
            with grid((size, size)) as (i, j):
                T.buffer_store(left, x[(*outer, i, j)].astype(dtype), [i, j])
            T.buffer_store(determinant, one, [0])
            with serial(size) as c:
                T.buffer_store(best, c, [0])
                with serial(size - c) as i, T.If(tirx.abs(left[c + i, c]) > tirx.abs(left[best[0], c])), T.Then():
                    T.buffer_store(best, c + i, [0])
                with T.If(best[0] != c), T.Then():
                    swap_rows(c, best[0])
                    T.buffer_store(determinant, -determinant[0], [0])
                T.buffer_store(determinant, determinant[0] * left[c, c], [0])
                with T.If(left[c, c] != zero), T.Then(), serial(size - c - 1) as i:
                    row = c + 1 + i
                    T.buffer_store(left, left[row, c] / left[c, c], [row, c])
                    with serial(size - c - 1) as j:
                        column = c + 1 + j
                        value = left[row, column] - left[row, c] * left[c, column]
                        T.buffer_store(left, value, [row, column])
            T.buffer_store(y, determinant[0].astype(x.dtype), list(outer))

    scratch = [((size, size), dtype), ((1,), dtype), ((1,), "int64")]
    (result,) = emit_loops(node, "det", statements, [x], [(x.shape[:-2], x.dtype)], scratch=scratch)
    return result
