"""ONNX DeformConv (https://onnx.ai/onnx/operators/onnx__DeformConv.html), over any number of spatial axes.

Each element of a window has its own data-dependent offset, and is interpolated linearly in X. Small tables give the
positions for all channels of an offset group. With them the windows are gathered into rows, which are multiplied by the
weights.
"""

from __future__ import annotations

import itertools
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value
from ...tensorir.independent_loops import independent_loops
from .. import op
from ..helpers.assertions import assert_divisible, assert_shape
from ..helpers.channels import channels_last, channels_second
from ..helpers.compute import number, relax_call, widen_dtype
from ..helpers.kernels import compute, emit_loops, let
from ..helpers.requirements import require_float, require_range
from ..math.matmul import emit_matmul, permute_axes, round_to
from ..tensor.reshape import reshape_to
from .conv import assert_bias_vector, read_kernel_shape
from .grid_sample import cast_size, to_clamped_index
from .window import SpatialWindow, assert_window_fits


@op("DeformConv", since=19)
def deform_conv(
    node: Node, x: Value, w: Value, offset: Value, bias: Value | None = None, mask: Value | None = None
) -> Value:
    """Emit [N, M, oD1, ...] of X [N, C, D1, ...] and W [M, C / group, k1, ...].

    The offset is [N, offset groups * elements of a window * spatial axes, oD1, ...], the bias [M], and the mask [N,
    offset groups * elements of a window, oD1, ...].
    """
    kernel, group, offset_group = (
        read_kernel_shape(node, x, w, "[M, C / group, k1, ...]"),
        node.attr("group", 1),
        _read_groups(node),
    )
    require_float(node, "X", x, code="deform_conv.dtype_unsupported")
    window = SpatialWindow.read(node, kernel)
    w = assert_divisible(node, w, 0, group, "group")
    outputs, inner = (number(node, f"dimension {axis} of W", w.shape[axis]) for axis in (0, 1))
    channels = inner * group
    if channels % offset_group:
        raise node.error(
            "deform_conv.channels_not_divisible",
            f"attribute offset_group is {offset_group}, for {channels} channels.",
            f"Choose a divisor of {channels}.",
        )
    x = assert_window_fits(
        node, channels_last(node, assert_shape(node, x, (x.shape[0], channels, *x.shape[2:]))), window
    )
    out_sizes = tuple(node.simplify(window.count(axis, size)) for axis, size in enumerate(x.shape[1:-1]))
    count = offset_group * window.elements
    offset = _assert_window_input(node, offset, "offset", (x.shape[0], count * len(kernel), *out_sizes))
    mask = None if mask is None else _assert_window_input(node, mask, "mask", (x.shape[0], count, *out_sizes))
    tables = _emit_tables(node, x.shape[1:-1], offset, window, offset_group)
    rows = _gather_rows(node, x, tables, mask, (x.shape[0], group, *out_sizes, *kernel, inner))
    y = _multiply_rows(node, rows, w, (x.shape[0], group, *out_sizes), window.elements * inner, outputs // group)
    if bias is not None:
        y = relax_call(node, relax.op.add, y, round_to(node, assert_bias_vector(node, bias, outputs), y.dtype))
    return channels_second(node, round_to(node, y, x.dtype))


def _read_groups(node: Node) -> int:
    groups = int(node.attr("offset_group", 1))
    require_range(node, "offset_group", groups, 1)
    return groups


def _assert_window_input(node: Node, value: Value, name: str, shape: Shape) -> Value:
    """Return an input with numbers for each window, proved or asserted to have that shape."""
    if value.rank != len(shape):
        raise node.error(
            "deform_conv.rank_mismatch", f"input {name} has rank {value.rank}.", f"Use rank {len(shape)}, like X."
        )
    return assert_shape(node, value, shape)


def _emit_tables(node: Node, sizes: Shape, offset: Value, window: SpatialWindow, groups: int) -> list[Value]:
    """Return for each spatial axis the table of elements before the read positions, and their distances.

    The elements [N, offset groups, oD1, ..., k1, ...] are those of X before the positions that windows read. The
    distance is from the element to the position.
    """
    axes, acc = len(window.kernel), widen_dtype(offset.dtype)
    batch, _, *out_sizes = offset.shape
    shape = (batch, groups, *out_sizes, *window.kernel)

    def statements(offset: Any, *tables: Any) -> None:
        with independent_loops(*tables[0].shape) as index:
            n, g, *position_index = index
            windows, ks = position_index[:axes], position_index[axes:]
            element = g
            for k, extent in zip(ks, window.kernel):
                element = element * extent + k
            for axis, size in enumerate(sizes):
                moved = offset[(n, element * axes + axis, *windows)].astype(acc)
                position = let(window.position(axis, size, windows[axis], ks[axis]).astype(acc) + moved)
                before = let(tirx.floor(position))
                is_near = tirx.all(position > tirx.const(-1.0, acc), position < cast_size(size, acc))
                T.buffer_store(tables[2 * axis], to_clamped_index(before), list(index))
                fraction = tirx.Select(is_near, position - before, tirx.const(0.0, acc))
                T.buffer_store(tables[2 * axis + 1], fraction, list(index))

    return list(emit_loops(node, "places", statements, [offset], [(shape, "int64"), (shape, acc)] * axes, sizes=sizes))


def _gather_rows(node: Node, x: Value, tables: list[Value], mask: Value | None, shape: Shape) -> Value:
    """Return the elements [N, groups, oD1, ..., k1, ..., C / group] that windows read of x [N, D1, ..., C]."""
    axes, acc, inner = x.rank - 2, widen_dtype(x.dtype), shape[-1]
    group_channels = shape[1] * inner // tables[0].shape[1]  # of an offset group
    kernel = shape[2 + axes : -1]

    def element(index: tuple[Any, ...], x: Any, *reads_and_sizes: Any) -> Any:
        n, group, *position, c = index
        reads, weigh, sizes = reads_and_sizes[: 2 * axes], reads_and_sizes[2 * axes : -axes], reads_and_sizes[-axes:]
        channel = group * inner + c
        offset_group = channel // group_channels
        total: Any = tirx.const(0.0, acc)
        for corner in itertools.product((0, 1), repeat=axes):
            corner_index = [reads[2 * axis](n, offset_group, *position) + step for axis, step in enumerate(corner)]
            is_inside = tirx.all(*(tirx.all(p >= 0, p < size) for p, size in zip(corner_index, sizes)))
            value = tirx.if_then_else(is_inside, x(n, *corner_index, channel).astype(acc), tirx.const(0.0, acc))
            for axis, step in enumerate(corner):
                fraction = reads[2 * axis + 1](n, offset_group, *position)
                value = value * (fraction if step else tirx.const(1.0, acc) - fraction)
            total = total + value
        if weigh:
            number = offset_group
            for k, extent in zip(position[axes:], kernel):
                number = number * extent + k
            total = total * weigh[0](n, number, *position[:axes]).astype(acc)
        return total.astype(x_dtype)

    x_dtype = x.dtype
    tensors = [x, *tables, *([] if mask is None else [mask])]
    return compute(node, "windows", element, tensors, shape, sizes=x.shape[1:-1])


def _multiply_rows(node: Node, rows: Value, w: Value, outer: Shape, inner: int, outputs: Size) -> Value:
    """Multiply rows by the weights of their groups.

    A row has `inner` elements. The result is [N, oD1, ..., M] in the accumulator type.
    """
    batch, group, *out_sizes = outer
    matrix = _arrange_weights(node, w, group, inner, outputs)
    if group == 1:
        return emit_matmul(node, reshape_to(node, rows, (batch, *out_sizes, inner)), matrix)
    count: Size = 1
    for size in out_sizes:
        count = count * size
    y = emit_matmul(node, reshape_to(node, rows, (batch, group, count, inner)), matrix)
    return reshape_to(node, permute_axes(node, y, [0, 2, 1, 3]), (batch, *out_sizes, group * outputs))


def _arrange_weights(node: Node, w: Value, group: int, inner: int, outputs: Size) -> Value:
    """Return W [M, C / group, k1, ...] as [group, k1 * ... * C / group, M / group].

    The group axis is omitted for a single group.
    """
    order = [0, *range(3, w.rank + 1), 2, 1]
    split, shape = (group, outputs, *w.shape[1:]), (group, inner, outputs)[group == 1 :]
    if w.constant is not None:
        return node.constant(w.constant.reshape(split).transpose(order).reshape(shape))
    return reshape_to(node, permute_axes(node, reshape_to(node, w, split), order), shape)
