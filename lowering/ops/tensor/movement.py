"""Transpose, Expand, Tile, Where and others that rearrange, repeat or select elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ...importing.node import Node
from ...importing.values import Shape, Size, Value, channels_second_axes, storage_dtype
from .. import op
from ..helpers import symbolic
from ..helpers.assertions import assert_in_bounds, assert_nonnegative, assert_shape, require
from ..helpers.channels import channels_second, unify_layouts
from ..helpers.contents import can_fold_contents, fits_contents, fold_contents, normalize_axis, read_sizes
from ..helpers.kernels import compute
from ..helpers.requirements import read_length, require_rank
from ..helpers.run_time import bind_sizes, compute_sizes
from .reshape import reshape_to

# Beyond any diagonal: adding to it does not wrap.
_MAX_DIAGONAL = 2**48


@op("Transpose", since=1)
def transpose(node: Node, data: Value) -> Value:
    order = node.attr("perm", list(reversed(range(data.rank))))
    if sorted(order) != list(range(data.rank)):
        raise node.error("transpose.perm_unsupported", f"attribute perm is {order} for data of rank {data.rank}.")
    return emit_transpose(node, data, order)


def emit_transpose(node: Node, data: Value, order: list[int]) -> Value:
    """Return the data with its dimensions in another order."""
    if can_fold_contents(data):
        assert data.contents is not None
        return fold_contents(node, data, data.contents.transpose(order))
    if data.rank > 3 and order == channels_second_axes(data.rank):
        return channels_second(node, data)
    (data,), axes, _ = unify_layouts(node, data)
    order = [axes.index(axis) for axis in order]
    if order == list(range(data.rank)):
        return data
    stored = [*order, data.rank] if data.dtype == "complex128" else order
    return node.emit(relax.op.permute_dims(node.tensor(data), stored), data.dtype)


@op("Expand", since=8)
def expand(node: Node, data: Value, shape: Value) -> Value:
    target = read_sizes(shape)
    require_rank(node, "shape", shape, "[rank of the result]", code="node.vector_required")
    if target is None:
        read_length(node, "shape", shape)
    count = shape.shape[0]
    rank = max(data.rank, count)
    if target is not None:
        data = assert_nonnegative(node, data, target, node.describe(shape, False))
    in_dims: list[Size] = [1] * (rank - data.rank) + list(data.shape)
    target_dims: list[Size] = [None] * rank if target is None else target
    target_dims = [1] * (rank - count) + target_dims[-count:] if count else [1] * rank
    dims = [_merge_broadcast_size(node, h, w) for h, w in zip(in_dims, target_dims)]
    for axis, (h, w, d) in enumerate(zip(in_dims, target_dims, dims)):
        if w is not None and d is not None:
            text = f"dimension {axis - rank} of the data is {{}}, and does not broadcast to {{}}."
            is_unit = symbolic.logical_or(symbolic.equal(h, 1), symbolic.equal(w, 1))
            data = require(
                node,
                data,
                symbolic.logical_or(symbolic.equal(h, w), is_unit),
                "expand.shapes_not_broadcastable",
                text,
                h,
                w,
            )
    open_axes = [k for k, d in enumerate(dims) if d is None]
    other_dims = tuple(d for d in dims if d is not None), data.dtype
    symbols = _bind_broadcast_sizes(node, shape, target is None, in_dims, target_dims, open_axes, other_dims)
    for axis, symbol in zip(open_axes, symbols):
        dims[axis] = symbol
    if data.contents is not None and can_fold_contents(data) and fits_contents(tuple(dims)):
        return fold_contents(node, data, np.broadcast_to(data.contents, tuple(d for d in dims if d is not None)))
    data = reshape_to(node, data, tuple(in_dims))
    if all(node.symbols.equal(h, d) for h, d in zip(in_dims, dims)):
        return data
    has_size = [node.symbols.equal(h, d) for h, d in zip(in_dims, dims)]

    def element(index: Any, x: Any, *read_sizes: Any) -> Any:
        # The only element of a dimension of size 1 replaces all. An index of an equal dimension is not changed by min.
        return x(*(i if same else tirx.min(i, n - 1) for i, n, same in zip(index, read_sizes, has_size)))

    return compute(node, "expand", element, [data], tuple(dims), in_dims)


def _merge_broadcast_size(node: Node, in_size: Size, target_size: Size | None) -> Size | None:
    """Return the broadcast of two sizes, either of which may be 1; None if only the run time decides."""
    if target_size is None:
        return None
    if (
        isinstance(in_size, int)
        and isinstance(target_size, int)
        and 1 not in (in_size, target_size)
        and in_size != target_size
    ):
        raise node.error(
            "expand.shapes_not_broadcastable", f"size {in_size} of the data does not broadcast to {target_size}."
        )
    if node.symbols.equal(in_size, 1):
        return target_size
    if node.symbols.equal(target_size, 1) or node.symbols.equal(in_size, target_size):
        return in_size
    return next((s for s in (in_size, target_size) if isinstance(s, int)), None)


def _bind_broadcast_sizes(
    node: Node,
    shape: Value,
    data_dependent: bool,
    in_dims: list[Size],
    target_dims: list[Size],
    axes: list[int],
    other_dims: tuple[Shape, str],
) -> list[Any]:
    """Return the symbols of the broadcast sizes on these axes, bound at run time."""
    if not axes:
        return []
    tensors = [node.emit(relax.op.astype(node.tensor(shape), "int64"))] if data_dependent else []
    missing = len(in_dims) - shape.shape[0]
    for axis in axes:
        if target_dims[axis] is not None:
            node.importer.expect(symbolic.equal(in_dims[axis], target_dims[axis]))

    def dims(*target: Any) -> list[Any]:
        result = []
        for axis in axes:
            h = in_dims[axis] * tirx.IntImm("int64", 1)
            w = target[0][axis - missing] if data_dependent else target_dims[axis]
            legal = tirx.Or(h == w, tirx.Or(h == 1, w == 1))
            text = (
                f"[expand.shapes_not_broadcastable] {node.where}: dimension {axis} of the data does not broadcast to "
            )
            text += f"{node.describe(shape, False)}."
            with T.Assert(legal, text, "ValueError"):
                pass
            result.append(tirx.Select(h == 1, w, h))
        return result

    used = [s for s in (*in_dims, *target_dims) if s is not None]
    return bind_sizes(
        node, compute_sizes(node, "expand_dims", len(axes), dims, tensors, used), other_dims, source=shape
    )


@op("Tile", since=6)
def tile(node: Node, data: Value, repeats: Value) -> Value:
    if repeats.rank != 1 or (isinstance(repeats.shape[0], int) and repeats.shape[0] != data.rank):
        raise node.error(
            "tile.repeats_unsupported",
            f"input repeats has the shape {list(repeats.shape)}, for data of rank {data.rank}.",
            "Give one number for each dimension.",
        )
    repeats = assert_shape(node, repeats, (data.rank,))
    static_repeats = read_sizes(repeats)
    times = bind_sizes(node, repeats, (data.shape, data.dtype)) if static_repeats is None else static_repeats
    data = assert_nonnegative(node, data, times, node.describe(repeats, False))
    shape = tuple(node.simplify(d * t) for d, t in zip(data.shape, times))
    if can_fold_contents(data) and fits_contents(shape) and all(isinstance(t, int) for t in times):
        assert data.contents is not None
        return fold_contents(node, data, np.tile(data.contents, times))
    has_one_repeat = [isinstance(t, int) and t == 1 for t in times]

    def element(index: Any, x: Any, *dims: Any) -> Any:
        unit = tirx.IntImm("int64", 1)
        periods = [
            tirx.max(d * unit, unit) for d in dims
        ]  # a dimension of size 0 is never indexed, but proofs divide by it
        return x(
            *(i if single else tirx.floormod(i, period) for i, period, single in zip(index, periods, has_one_repeat))
        )

    return compute(node, "tile", element, [data], shape, data.shape)


@op("Where", since=9)
def where(node: Node, condition: Value, a: Value, b: Value) -> Value:
    folded = symbolic.elementwise(node, symbolic.where, condition, a, b, dtype=a.dtype)
    if folded is not None:
        return folded
    values = node.unify(condition, a, b)
    rank = max(v.rank for v in values)
    shape: list[Size] = [1] * rank
    for value in values:
        for axis, d in enumerate(value.shape, start=rank - value.rank):
            if not (isinstance(d, int) and d == 1):
                shape[axis] = d

    def element(index: Any, *reads: Any) -> Any:
        c, x, y = (
            read(*(0 if isinstance(d, int) and d == 1 else i for i, d in zip(index[rank - v.rank :], v.shape)))
            for read, v in zip(reads, values)
        )
        return tirx.Select(c, x, y)

    return compute(node, "where", element, values, tuple(shape), dtype=a.dtype)


@op("Trilu", since=14)
def trilu(node: Node, data: Value, k: Value | None = None) -> Value:
    upper = bool(node.attr("upper", 1))
    require_rank(node, "input", data, "[rows, columns, ...]", code="trilu.rank_unsupported")
    offset = [0] if k is None else read_sizes(k)
    far = tirx.IntImm("int64", _MAX_DIAGONAL)
    zero = tirx.const(0, storage_dtype(data.dtype))

    def element(index: Any, x: Any, diagonal: Any) -> Any:
        near = tirx.max(tirx.min(diagonal if offset is not None else diagonal(), far), -far)
        last = index[-2] + near
        return tirx.Select(index[-1] >= last if upper else index[-1] <= last, x(*index), zero)

    if offset is None:
        assert k is not None
        return compute(node, "trilu", element, [data, reshape_to(node, k, ())], data.shape)
    return compute(node, "trilu", element, [data], data.shape, offset)


@op("OneHot", since=9)
def one_hot(node: Node, indices: Value, depth: Value, values: Value) -> Value:
    axis = normalize_axis(node, node.attr("axis", -1), indices.rank + 1)
    count = read_sizes(depth)
    if count is None:
        wide = node.emit(relax.op.astype(node.tensor(reshape_to(node, depth, (1,))), "int64"))
        count = bind_sizes(node, wide, (indices.shape, values.dtype), source=depth)
    values = assert_shape(node, assert_nonnegative(node, values, count, node.describe(depth, False)), (2,))
    shape = (*indices.shape[:axis], count[0], *indices.shape[axis:])

    def element(index: Any, at: Any, pair: Any, size: Any) -> Any:
        position = at(*index[:axis], *index[axis + 1 :]).astype("int64")
        position = tirx.Select(position < 0, position + size, position)
        return tirx.Select(position == index[axis], pair(1), pair(0))

    return compute(node, "one_hot", element, [indices, values], shape, [count[0]], values.dtype)


@op("ReverseSequence", since=10)
def reverse_sequence(node: Node, data: Value, lengths: Value) -> Value:
    batch, time = node.attr("batch_axis", 1), node.attr("time_axis", 0)
    if {batch, time} != {0, 1} or data.rank < 2 or lengths.rank != 1:
        problem = (
            f"attributes batch_axis and time_axis are {batch} and {time}, and the inputs have ranks {data.rank} and"
        )
        raise node.error(
            "reverse_sequence.input_unsupported",
            f"{problem} {lengths.rank}.",
            "Use the axes 0 and 1 of data of rank 2 or more, and a vector of lengths.",
        )
    lengths = assert_shape(node, lengths, (data.shape[batch],))
    length_name = f"the length of {node.describe(data, False)}"
    lengths = assert_in_bounds(
        node, lengths, node.simplify(data.shape[time] + 1), bound_name=length_name, from_the_back=False
    )

    def element(index: Any, x: Any, length: Any) -> Any:
        n, i = length(index[batch]).astype("int64"), index[time]
        position = list(index)
        position[time] = tirx.Select(i < n, n - 1 - i, i)
        return x(*position)

    return compute(node, "reverse_sequence", element, [data, lengths], data.shape)


@op("DepthToSpace", since=1)
def depth_to_space(node: Node, data: Value) -> Value:
    b, mode = _read_block_size(node, data), node.attr("mode", "DCR")
    n, c, h, w = data.shape
    depth = _divide(node, c, b * b)
    if mode == "DCR":
        data = emit_transpose(node, reshape_to(node, data, (n, b, b, depth, h, w)), [0, 3, 4, 1, 5, 2])
    else:
        data = emit_transpose(node, reshape_to(node, data, (n, depth, b, b, h, w)), [0, 1, 4, 2, 5, 3])
    return reshape_to(node, data, (n, depth, h * b, w * b))


@op("SpaceToDepth", since=1)
def space_to_depth(node: Node, data: Value) -> Value:
    b = _read_block_size(node, data)
    n, c, h, w = data.shape
    rows, columns = _divide(node, h, b), _divide(node, w, b)
    order = [0, 3, 5, 1, 2, 4] if node.attr("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    data = emit_transpose(node, reshape_to(node, data, (n, c, rows, b, columns, b)), order)
    return reshape_to(node, data, (n, c * b * b, rows, columns))


_MAX_BLOCK = 2**20  # no dimension is larger than its square


def _read_block_size(node: Node, data: Value) -> int:
    size = int(node.attr("blocksize"))
    if data.rank != 4 or not 1 <= size <= _MAX_BLOCK:
        raise node.error(
            "node.blocksize_unsupported",
            f"attribute blocksize is {size}, and the input has rank {data.rank}.",
            f"Use rank 4, and a blocksize of 1 to {_MAX_BLOCK}.",
        )
    return size


def _divide(node: Node, size: Size, by: int) -> Size:
    if isinstance(size, int):
        if size % by:
            raise node.error(
                "node.size_not_divisible", f"size {size} is not divisible by {by}, as attribute blocksize requires."
            )
        return size // by
    return node.simplify(tirx.floordiv(size, tirx.IntImm("int64", by)))
