"""ONNX DeformConv (https://onnx.ai/onnx/operators/onnx__DeformConv.html), over any number of spatial axes.

Each element of a window lies at an offset of its own, which is data, and is interpolated linearly in X. Small tables
say where, for all channels of an offset group. With them the windows are gathered into rows, which are multiplied by
the weights.
"""

from __future__ import annotations

import itertools
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing.channels import channels_last, channels_second
from ..importing.compute import is_float, number, relax_call, widened
from ..importing.node import Node
from ..importing.values import Shape, Size, Value
from ..tensorir.independent import independent
from . import op
from .asserted import asserted, divisible
from .conv import kernel_of, vector_of
from .grid_sample import far_index, number_of
from .kernels import compute, let, loops
from .matmul import emit_matmul, permuted, rounded
from .reshape import reshape_to
from .window import Window, fitting


@op("DeformConv", since=19)
def deform_conv(
    node: Node, x: Value, w: Value, offset: Value, bias: Value | None = None, mask: Value | None = None
) -> Value:
    """[N, M, oD1, ...] of X [N, C, D1, ...], W [M, C / group, k1, ...], the offset [N, offset groups * elements of a
    window * spatial axes, oD1, ...], the bias [M] and the mask [N, offset groups * elements of a window, oD1, ...]."""
    kernel, group, offset_group = kernel_of(node, x, w, "[M, C / group, k1, ...]"), node.attr("group", 1), _groups(node)
    if not is_float(x.dtype):
        raise node.error(f"input X is {x.dtype}.", "Make it a float.")
    window = Window.of(node, kernel)
    w = divisible(node, w, 0, group, "group")
    outputs, inner = (number(node, f"dimension {axis} of W", w.shape[axis]) for axis in (0, 1))
    channels = inner * group
    if channels % offset_group:
        raise node.error(f"attribute offset_group is {offset_group}, for {channels} channels.", "Make it divide them.")
    x = fitting(node, channels_last(node, asserted(node, x, (x.shape[0], channels, *x.shape[2:]))), window)
    places = tuple(node.simplify(window.count(axis, size)) for axis, size in enumerate(x.shape[1:-1]))
    count = offset_group * window.elements
    offset = _around(node, offset, "offset", (x.shape[0], count * len(kernel), *places))
    mask = None if mask is None else _around(node, mask, "mask", (x.shape[0], count, *places))
    tables = _tables(node, x.shape[1:-1], offset, window, offset_group)
    rows = _rows(node, x, tables, mask, (x.shape[0], group, *places, *kernel, inner))
    y = _multiplied(node, rows, w, (x.shape[0], group, *places), window.elements * inner, outputs // group)
    if bias is not None:
        y = relax_call(node, relax.op.add, y, rounded(node, vector_of(node, bias, outputs), y.dtype))
    return channels_second(node, rounded(node, y, x.dtype))


def _groups(node: Node) -> int:
    groups = int(node.attr("offset_group", 1))
    if groups < 1:
        raise node.error(f"attribute offset_group is {groups}.", "Make it 1 or more.")
    return groups


def _around(node: Node, value: Value, name: str, shape: Shape) -> Value:
    """Return an input that has numbers for each window, which is known or asserted at run time to have that shape."""
    if value.rank != len(shape):
        raise node.error(f"input {name} has rank {value.rank}.", f"Make it {len(shape)}, like X.")
    return asserted(node, value, shape)


def _tables(node: Node, sizes: Shape, offset: Value, window: Window, groups: int) -> list[Value]:
    """Return for each spatial axis the elements [N, offset groups, oD1, ..., k1, ...] of X before the places where
    windows read, and how far behind them the places are."""
    axes, acc = len(window.kernel), widened(offset.dtype)
    batch, _, *places = offset.shape
    shape = (batch, groups, *places, *window.kernel)

    def statements(offset: Any, *tables: Any) -> None:
        with independent(*tables[0].shape) as index:
            n, g, *others = index
            windows, ks = others[:axes], others[axes:]
            element = g
            for k, extent in zip(ks, window.kernel):
                element = element * extent + k
            for axis, size in enumerate(sizes):
                moved = offset[(n, element * axes + axis, *windows)].astype(acc)
                at = let(window.position(axis, size, windows[axis], ks[axis]).astype(acc) + moved)
                before = let(tirx.floor(at))
                is_near = tirx.all(at > tirx.const(-1.0, acc), at < number_of(size, acc))
                T.buffer_store(tables[2 * axis], far_index(before), list(index))
                fraction = tirx.Select(is_near, at - before, tirx.const(0.0, acc))
                T.buffer_store(tables[2 * axis + 1], fraction, list(index))

    return list(loops(node, "places", statements, [offset], [(shape, "int64"), (shape, acc)] * axes, sizes=sizes))


def _rows(node: Node, x: Value, tables: list[Value], mask: Value | None, shape: Shape) -> Value:
    """Return the elements [N, groups, oD1, ..., k1, ..., C / group] that windows read of x [N, D1, ..., C]."""
    axes, acc, inner = x.rank - 2, widened(x.dtype), shape[-1]
    each = shape[1] * inner // tables[0].shape[1]  # channels of an offset group
    kernel = shape[2 + axes : -1]

    def element(index: tuple[Any, ...], x: Any, *others: Any) -> Any:
        n, group, *place, c = index
        reads, weigh, sizes = others[: 2 * axes], others[2 * axes : -axes], others[-axes:]
        channel = group * inner + c
        offset_group = channel // each
        total: Any = tirx.const(0.0, acc)
        for corner in itertools.product((0, 1), repeat=axes):
            at = [reads[2 * axis](n, offset_group, *place) + step for axis, step in enumerate(corner)]
            is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(at, sizes)))
            value = tirx.if_then_else(is_inside, x(n, *at, channel).astype(acc), tirx.const(0.0, acc))
            for axis, step in enumerate(corner):
                fraction = reads[2 * axis + 1](n, offset_group, *place)
                value = value * (fraction if step else tirx.const(1.0, acc) - fraction)
            total = total + value
        if weigh:
            number = offset_group
            for k, extent in zip(place[axes:], kernel):
                number = number * extent + k
            total = total * weigh[0](n, number, *place[:axes]).astype(acc)
        return total.astype(x_dtype)

    x_dtype = x.dtype
    tensors = [x, *tables, *([] if mask is None else [mask])]
    return compute(node, "windows", element, tensors, shape, sizes=x.shape[1:-1])


def _multiplied(node: Node, rows: Value, w: Value, outer: Shape, inner: int, outputs: Size) -> Value:
    """Return rows, of so many elements each, by the weights of their groups: [N, oD1, ..., M] in the accumulator's
    type."""
    batch, group, *places = outer
    matrix = _matrix(node, w, group, inner, outputs)
    if group == 1:
        return emit_matmul(node, reshape_to(node, rows, (batch, *places, inner)), matrix)
    count: Size = 1
    for size in places:
        count = count * size
    y = emit_matmul(node, reshape_to(node, rows, (batch, group, count, inner)), matrix)
    return reshape_to(node, permuted(node, y, [0, 2, 1, 3]), (batch, *places, group * outputs))


def _matrix(node: Node, w: Value, group: int, inner: int, outputs: Size) -> Value:
    """Return W [M, C / group, k1, ...] as [group, k1 * ... * C / group, M / group], without groups if there is one."""
    order = [0, *range(3, w.rank + 1), 2, 1]
    split, shape = (group, outputs, *w.shape[1:]), (group, inner, outputs)[group == 1 :]
    if w.constant is not None:
        return node.constant(w.constant.reshape(split).transpose(order).reshape(shape))
    return reshape_to(node, permuted(node, reshape_to(node, w, split), order), shape)
