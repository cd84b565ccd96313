"""Indices of the largest elements of windows: MaxPool with Indices, and MaxUnpool, which writes elements to them.

https://onnx.ai/onnx/operators/onnx__MaxUnpool.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Size, Value, prod, storage_dtype
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_shape, require
from ..helpers.channels import channels_second
from ..helpers.compute import MAXIMUM, is_float
from ..helpers.contents import read_sizes
from ..helpers.kernels import emit_loops, grid
from ..helpers.run_time import bind_sizes
from .window import SpatialWindow


def emit_max_with_indices(node: Node, x: Value, window: SpatialWindow) -> tuple[Value, Value]:
    """Emit the largest elements of windows and their indices, both [N, C, windows, ...].

    x is [N, D1, ..., C]. An index is the flat index of the element in [N, C, D1, ...]. The first of equal elements
    wins. With attribute storage_order 1 the first spatial axis varies fastest.
    """
    batch, *sizes, channels = x.shape
    n, by_columns = len(sizes), bool(node.attr("storage_order", 0))
    counts = [node.simplify(window.count(axis, size)) for axis, size in enumerate(sizes)]

    def statements(x: Any, y: Any, indices: Any) -> None:
        with independent_loops(*y.shape) as index:
            T.buffer_store(indices, tirx.const(-1, "int64"), list(index))
            T.buffer_store(y, MAXIMUM.identity(x.dtype), list(index))  # the result of a window that is all padding
            with grid([tirx.const(k, "int64") for k in window.kernel]) as ks:
                position = [window.position(axis, sizes[axis], index[1 + axis], ks[axis]) for axis in range(n)]
                is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(position, sizes)))
                with T.If(is_inside), T.Then():
                    value, best = x[(index[0], *position, index[-1])], y[index]
                    better = tirx.any(indices[index] < 0, value > best)
                    if is_float(str(value.ty.dtype)):
                        better = tirx.any(better, tirx.all(_is_nan(value), tirx.Not(_is_nan(best))))
                    with T.If(better), T.Then():
                        T.buffer_store(y, value, list(index))
                        outer = index[0] * channels + index[-1]
                        T.buffer_store(indices, _flatten_index(outer, position, sizes, by_columns), list(index))

    shape = (batch, *counts, channels)
    results = emit_loops(node, "max_pool", statements, [x], [(shape, x.dtype), (shape, "int64")])
    y, indices = (channels_second(node, value) for value in results)
    return y, indices


def _is_nan(value: Any) -> Any:
    return tirx.isnan(value.astype("float32"))


def _flatten_index(outer: Any, position: Sequence[Any], sizes: Sequence[Size], by_columns: bool) -> Any:
    axes = range(len(sizes))
    number: Any = tirx.const(0, "int64")
    for axis in reversed(axes) if by_columns else axes:
        number = number * sizes[axis] + position[axis]
    return outer * prod(sizes) + number


@op("MaxUnpool", since=9)
def max_unpool(node: Node, x: Value, indices: Value, output_shape: Value | None = None) -> Value:
    """Emit zeros, except for the elements of X at their indices [N, C, windows, ...] in the pooled tensor.

    The pooled tensor lies in the corner of a tensor of output_shape.
    """
    kernel = node.attr("kernel_shape")
    if len(kernel) != x.rank - 2 or not kernel or storage_dtype(x.dtype) != x.dtype or indices.dtype != "int64":
        raise node.error(
            "max_unpool.input_unsupported",
            f"X is {x.dtype} of rank {x.rank}, I is {indices.dtype}, and attribute kernel_shape is {list(kernel)}.",
            "Give X the shape [N, C, D1, ...] and a number type, I the type int64, and the kernel a size for each of "
            "D1, ...",
        )
    window, n = SpatialWindow.read(node, kernel), len(kernel)
    if indices.rank != x.rank:
        raise node.error("max_unpool.rank_mismatch", f"input I has rank {indices.rank}.", f"Use rank {x.rank}, like X.")
    indices = assert_shape(node, indices, x.shape)
    pooled: list[Size] = [*x.shape[:2]]
    for axis, size in enumerate(x.shape[2:]):
        padding = window.pads[axis] + window.pads[n + axis]
        length = node.simplify((size - 1) * window.strides[axis] - padding + kernel[axis])
        text = f"windows and pads leave {{}} elements along axis {2 + axis}."
        x = require(node, x, symbolic.less_or_equal(0, length), "max_unpool.pads_too_large", text, length)
        pooled.append(length)
    shape = pooled
    if output_shape is not None:
        if output_shape.shape != (x.rank,):
            raise node.error(
                "max_unpool.output_shape_unsupported",
                f"input output_shape has the shape {list(output_shape.shape)}.",
                f"Give it the shape [{x.rank}].",
            )
        static_shape = read_sizes(output_shape)
        shape = bind_sizes(node, output_shape, ((), x.dtype)) if static_shape is None else static_shape
        for axis, (out_size, pooled_size) in enumerate(zip(shape, pooled)):
            fits = symbolic.equal(out_size, pooled_size) if axis < 2 else symbolic.less_or_equal(pooled_size, out_size)
            text = f"input output_shape is {{}} along axis {axis}, where {{}} elements were pooled."
            x = require(node, x, fits, "max_unpool.output_shape_mismatch", text, out_size, pooled_size)
    indices = assert_in_bounds(
        node, indices, node.simplify(prod(pooled)), bound_name="what was pooled", from_the_back=False
    )
    indices = node.emit(relax.op.astype(node.tensor(indices), "int64"))

    def statements(x: Any, indices: Any, y: Any) -> None:
        with independent_loops(*y.shape) as index:
            T.buffer_store(y, tirx.const(0, x.dtype), list(index))
        with grid(x.shape) as index:
            rest, position = T.bind(indices[index]), list[Any]()
            for size in reversed(pooled[1:]):
                position.insert(0, tirx.floormod(rest, size))
                rest = T.bind(tirx.floordiv(rest, size))
            T.buffer_store(y, x[index], [rest, *position])

    (y,) = emit_loops(node, "max_unpool", statements, [x, indices], [(tuple(shape), x.dtype)], pooled)
    return y
