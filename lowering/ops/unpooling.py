"""Where the largest elements of windows are: MaxPool with its Indices, and MaxUnpool, which puts elements back there
(https://onnx.ai/onnx/operators/onnx__MaxUnpool.html)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.channels import channels_second
from ..importing.compute import is_float, largest
from ..importing.node import Node
from ..importing.values import Size, Value, prod, storage_dtype
from ..tensorir.independent import independent
from . import op
from .asserted import asserted, inside, required
from .contents import sizes as contents_of
from .kernels import grid, loops
from .run_time import bind
from .window import Window


def largest_and_places(node: Node, x: Value, window: Window) -> tuple[Value, Value]:
    """[N, C, windows, ...] twice: of x [N, D1, ..., C] the largest elements, and where they are in [N, C, D1, ...], by
    the number of the element; of equal ones the first. Attribute storage_order 1 counts the first spatial axis
    fastest."""
    batch, *sizes, channels = x.shape
    n, by_columns = len(sizes), bool(node.attr("storage_order", 0))
    counts = [node.simplify(window.count(axis, size)) for axis, size in enumerate(sizes)]

    def statements(x: Any, y: Any, places: Any) -> None:
        with independent(*y.shape) as index:
            T.buffer_store(places, tirx.const(-1, "int64"), list(index))
            T.buffer_store(y, largest.identity(x.dtype), list(index))  # of a window that is all padding
            with grid([tirx.const(k, "int64") for k in window.kernel]) as ks:
                at = [window.position(axis, sizes[axis], index[1 + axis], ks[axis]) for axis in range(n)]
                there = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(at, sizes)))
                with T.If(there), T.Then():
                    value, best = x[(index[0], *at, index[-1])], y[index]
                    better = tirx.any(places[index] < 0, value > best)
                    if is_float(str(value.ty.dtype)):
                        better = tirx.any(better, tirx.all(_is_nan(value), tirx.Not(_is_nan(best))))
                    with T.If(better), T.Then():
                        T.buffer_store(y, value, list(index))
                        outer = index[0] * channels + index[-1]
                        T.buffer_store(places, _number(outer, at, sizes, by_columns), list(index))

    shape = (batch, *counts, channels)
    made = loops(node, "max_pool", statements, [x], [(shape, x.dtype), (shape, "int64")])
    y, places = (channels_second(node, value) for value in made)
    return y, places


def _is_nan(value: Any) -> Any:
    return tirx.isnan(value.astype("float32"))


def _number(outer: Any, at: Sequence[Any], sizes: Sequence[Size], by_columns: bool) -> Any:
    axes = range(len(sizes))
    number: Any = tirx.const(0, "int64")
    for axis in reversed(axes) if by_columns else axes:
        number = number * sizes[axis] + at[axis]
    return outer * prod(sizes) + number


@op("MaxUnpool", since=9)
def max_unpool(node: Node, x: Value, places: Value, output_shape: Value | None = None) -> Value:
    """Zeros, but for the elements of X at the places [N, C, windows, ...] in what was pooled; that lies in the corner
    of a tensor of output_shape."""
    kernel = node.attr("kernel_shape")
    if len(kernel) != x.rank - 2 or not kernel or storage_dtype(x.dtype) != x.dtype or places.dtype != "int64":
        raise node.error(
            f"X is {x.dtype} of rank {x.rank}, I {places.dtype}, and attribute kernel_shape {list(kernel)}.",
            "X is [N, C, D1, ...] of numbers, and I int64.",
        )
    window, n = Window.of(node, kernel), len(kernel)
    if places.rank != x.rank:
        raise node.error(f"input I has rank {places.rank}.", f"Make it {x.rank}, as X has it.")
    places = asserted(node, places, x.shape)
    pooled: list[Size] = [*x.shape[:2]]
    for axis, size in enumerate(x.shape[2:]):
        cut = window.pads[axis] + window.pads[n + axis]
        length = node.simplify((size - 1) * window.strides[axis] - cut + kernel[axis])
        text = f"windows and pads leave {{}} elements along axis {2 + axis}."
        x = required(node, x, symbolic.less_or_equal(0, length), text, length)
        pooled.append(length)
    shape = pooled
    if output_shape is not None:
        if output_shape.shape != (x.rank,):
            raise node.error(f"input output_shape is {list(output_shape.shape)}.", f"Make it [{x.rank}].")
        known = contents_of(output_shape)
        shape = bind(node, output_shape, ((), x.dtype)) if known is None else known
        for axis, (wanted, least) in enumerate(zip(shape, pooled)):
            fits = symbolic.equal(wanted, least) if axis < 2 else symbolic.less_or_equal(least, wanted)
            text = f"input output_shape asks for {{}} elements along axis {axis}, and {{}} were pooled."
            x = required(node, x, fits, text, wanted, least)
    places = inside(node, places, node.simplify(prod(pooled)), of="what was pooled", from_the_back=False)
    places = node.emit(relax.op.astype(node.tensor(places), "int64"))

    def statements(x: Any, places: Any, y: Any) -> None:
        with independent(*y.shape) as index:
            T.buffer_store(y, tirx.const(0, x.dtype), list(index))
        with grid(x.shape) as index:
            rest, at = T.bind(places[index]), list[Any]()
            for size in reversed(pooled[1:]):
                at.insert(0, tirx.floormod(rest, size))
                rest = T.bind(tirx.floordiv(rest, size))
            T.buffer_store(y, x[index], [rest, *at])

    (y,) = loops(node, "max_unpool", statements, [x, places], [(tuple(shape), x.dtype)], pooled)
    return y
