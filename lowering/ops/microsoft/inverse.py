"""com.microsoft Inverse: inverses of [..., M, M] by elimination with partial pivoting in each column."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Value
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.compute import widen_dtype
from ..helpers.kernels import emit_loops, grid, let, serial
from ..math.determinant import require_square
from . import DOMAIN


@op("Inverse", since=1, domain=DOMAIN)
def inverse(node: Node, x: Value) -> Value:
    """Invert the matrices; a singular matrix gives infinities or NaNs, as in onnxruntime."""
    x = require_square(node, x)
    dtype, size = widen_dtype(x.dtype), x.shape[-1]

    def statements(x: Any, y: Any, work: Any, pivot: Any) -> None:
        with independent_loops(*x.shape[:-2]) as outer:
            with grid((size, size)) as (i, j):
                T.buffer_store(work, x[(*outer, i, j)].astype(dtype), [i, j])
                T.buffer_store(work, tirx.Select(i == j, tirx.const(1, dtype), tirx.const(0, dtype)), [i, size + j])
            with serial(size) as column:
                T.buffer_store(pivot, column, [0])
                with serial(size - column) as k:
                    is_larger = tirx.abs(work[column + k, column]) > tirx.abs(work[pivot[0], column])
                    T.buffer_store(pivot, tirx.Select(is_larger, column + k, pivot[0]), [0])
                with serial(2 * size) as k:
                    saved = let(work[column, k])
                    T.buffer_store(work, work[pivot[0], k], [column, k])
                    T.buffer_store(work, saved, [pivot[0], k])
                divisor = let(work[column, column])
                with serial(2 * size) as k:
                    T.buffer_store(work, work[column, k] / divisor, [column, k])
                with serial(size) as row, T.If(row != column), T.Then():
                    factor = let(work[row, column])
                    with serial(2 * size) as k:
                        T.buffer_store(work, work[row, k] - factor * work[column, k], [row, k])
            with grid((size, size)) as (i, j):
                T.buffer_store(y, work[i, size + j].astype(x.dtype), [*outer, i, j])

    scratch = [((size, 2 * size), dtype), ((1,), "int64")]
    (result,) = emit_loops(node, "inverse", statements, [x], [(x.shape, x.dtype)], scratch=scratch)
    return result
