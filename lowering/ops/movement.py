"""Transpose, Concat, Split, Expand, Tile, Where and others that rearrange, repeat, join or choose elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from ..importing import symbolic
from ..importing.channels import as_computed, channels_second, channels_second_axes
from ..importing.compute import in_groups
from ..importing.node import Node
from ..importing.values import Shape, Size, Value, empty, storage_dtype
from . import op
from .asserted import asserted, inside, no_negative, required
from .contents import few, movable, moved, sizes, static_axis
from .kernels import blocks, compute, grid
from .reshape import reshape_to
from .run_time import bind, compute_sizes
from .slice import cut

# Farther than any diagonal: sums with it do not wrap.
_FAR = 2**48


@op("Transpose", since=1)
def transpose(node: Node, data: Value) -> Value:
    order = node.attr("perm", list(reversed(range(data.rank))))
    if sorted(order) != list(range(data.rank)):
        raise node.error(f"attribute perm is {order} for data of rank {data.rank}.")
    return permute(node, data, order)


def permute(node: Node, data: Value, order: list[int]) -> Value:
    """The data with its dimensions in another order."""
    if movable(data):
        assert data.contents is not None
        return moved(node, data, data.contents.transpose(order))
    if data.rank > 3 and order == channels_second_axes(data.rank):
        return channels_second(node, data)
    (data,), places, _ = as_computed(node, data)
    order = [places.index(axis) for axis in order]
    if order == list(range(data.rank)):
        return data
    stored = [*order, data.rank] if data.dtype == "complex128" else order
    return node.emit(relax.op.permute_dims(node.tensor(data), stored), data.dtype)


@op("Concat", since=4)
def concat(node: Node, *parts: Value) -> Value:
    return concatenate(node, parts, static_axis(node, node.attr("axis"), parts[0].rank))


def concatenate(node: Node, parts: Sequence[Value], axis: int) -> Value:
    """Return the parts one after the other along an axis; other dimensions are known or asserted to be equal.

    Raises:
        NodeError: Ranks differ, or numbers of other axes.
    """
    if any(p.rank != parts[0].rank for p in parts):
        raise node.error(f"inputs have different ranks: {[p.rank for p in parts]}.")
    if movable(*parts):
        joined = np.concatenate([p.contents for p in parts if p.contents is not None], axis=axis)
        if few(joined.shape):
            return moved(node, parts[0] if all(symbolic.known(p) for p in parts) else node.constant(joined), joined)
    parts = tuple(_aligned(node, p, parts[0].shape, axis) for p in parts)
    parts = tuple(p for p in parts if not empty((p.shape[axis],))) or parts[:1]
    stored, order, back = as_computed(node, *parts)
    return back(in_groups(lambda group: join(node, group, order.index(axis)), stored))


def join(node: Node, parts: Sequence[Value], axis: int) -> Value:
    """A kernel that copies the parts, whose shapes agree, behind each other."""
    if len(parts) == 1:
        return parts[0]
    total = node.simplify(sum(p.shape[axis] for p in parts))
    shape = (*parts[0].shape[:axis], total, *parts[0].shape[axis + 1 :])

    def statements(*buffers: Any) -> None:
        *sources, out = buffers
        start: Any = tirx.IntImm("int64", 0)
        for source in sources:
            with grid(source.shape) as loop, T.sblock(f"part_{source.name}"):
                index = [T.axis.spatial(n, i) for n, i in zip(source.shape, loop)]
                target = [i + start if k == axis else i for k, i in enumerate(index)]
                T.reads(source[tuple(index)])
                T.writes(out[tuple(target)])
                T.buffer_store(out, source[tuple(index)], target)
            start = start + source.shape[axis]

    return blocks(node, "concat", statements, parts, (shape, parts[0].dtype))


def _aligned(node: Node, part: Value, like: Shape, axis: int) -> Value:
    """The part, asserted to have the dimensions of `like` in all axes but one."""
    shape = (*like[:axis], part.shape[axis], *like[axis + 1 :])
    if any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(part.shape, shape)):
        raise node.error(f"shapes {list(part.shape)} and {list(like)} differ outside of axis {axis}.")
    return asserted(node, part, shape)


@op("Split", since=2)
def split(node: Node, data: Value, lengths: Value | None = None) -> tuple[Value, ...]:
    axis, count = static_axis(node, node.attr("axis", 0), data.rank), len(node.outputs)
    dim = data.shape[axis]
    parts: list[Size] | None = node.attr("split", None)
    if lengths is not None:
        if lengths.rank != 1:
            raise node.error(f"input split has rank {lengths.rank}.", "Make it a vector.")
        lengths = asserted(node, lengths, (count,))
        known = sizes(lengths)
        parts = bind(node, lengths) if known is None else known
    elif parts is None:
        parts = _even_parts(node, dim, count)
        text = f"{count} parts are asked for of dimension {axis}, which is {{}}: the last would have less than nothing."
        data = required(node, data, symbolic.less_or_equal(parts[0] * (count - 1), dim), text, dim)
    if len(parts) != count:
        raise node.error(f"there are {count} outputs but {len(parts)} lengths.")
    return tuple(split_axis(node, data, axis, parts))


def split_axis(node: Node, data: Value, axis: int, parts: Sequence[Size]) -> list[Value]:
    """Return parts of these lengths along an axis, which are known or asserted to be all of it.

    Raises:
        NodeError: Lengths that are numbers are another number together, or one is negative.
    """
    dim = data.shape[axis]
    total = node.simplify(sum(parts))
    if isinstance(total, int) and isinstance(dim, int) and total != dim:
        raise node.error(f"the lengths {parts} do not add up to dimension {axis}, which is {dim}.")
    data = no_negative(node, data, parts, "the split")
    data = asserted(node, data, (*data.shape[:axis], total, *data.shape[axis + 1 :]))
    results, start = [], 0
    for length in parts:
        begins: list[Size] = [0] * data.rank
        begins[axis] = node.simplify(start)
        shape = (*data.shape[:axis], length, *data.shape[axis + 1 :])
        results.append(cut(node, data, begins, [1] * data.rank, shape))
        start = start + length
    return results


def _even_parts(node: Node, dim: Size, count: int) -> list[Size]:
    """Equal parts; from version 18 on, with num_outputs, the last ones may be smaller."""
    if isinstance(dim, int):
        if dim % count and node.version < 18:
            raise node.error(f"a dimension of {dim} has no {count} equal parts.", "Give the lengths.")
        size = -(-dim // count)
        if (count - 1) * size > dim:
            raise node.error(f"a dimension of {dim} has no {count} parts of {size}, the last of which may be smaller.")
        return [max(min(dim - k * size, size), 0) for k in range(count)]
    size = node.simplify(tirx.floordiv(dim + (count - 1), tirx.IntImm("int64", count)))
    if node.version < 18 or node.symbols.equal(size * count, dim):
        return [size] * count
    return [node.simplify(symbolic.maximum(symbolic.minimum(dim - k * size, size), 0)) for k in range(count)]


@op("Expand", since=8)
def expand(node: Node, data: Value, shape: Value) -> Value:
    target = sizes(shape)
    if shape.rank != 1:
        raise node.error(f"input shape has rank {shape.rank}.", "Make it a vector.")
    if target is None and not isinstance(shape.shape[0], int):
        raise node.error("input shape has a symbolic length, so the rank of the result is unknown.")
    count = shape.shape[0]
    rank = max(data.rank, count)
    if target is not None:
        data = no_negative(node, data, target, node.name_of(shape, False))
    have: list[Size] = [1] * (rank - data.rank) + list(data.shape)
    want: list[Size] = [None] * rank if target is None else target
    want = [1] * (rank - count) + want[-count:] if count else [1] * rank
    dims = [_broadcast_size(node, h, w) for h, w in zip(have, want)]
    for axis, (h, w, d) in enumerate(zip(have, want, dims)):
        if w is not None and d is not None:
            text = f"dimension {axis - rank} of the data is {{}}, and does not broadcast to {{}}."
            one = symbolic.logical_or(symbolic.equal(h, 1), symbolic.equal(w, 1))
            data = required(node, data, symbolic.logical_or(symbolic.equal(h, w), one), text, h, w)
    open_axes = [k for k, d in enumerate(dims) if d is None]
    beside = tuple(d for d in dims if d is not None), data.dtype
    symbols = _broadcast_at_run_time(node, shape, target is None, have, want, open_axes, beside)
    for axis, symbol in zip(open_axes, symbols):
        dims[axis] = symbol
    if data.contents is not None and movable(data) and few(tuple(dims)):
        return moved(node, data, np.broadcast_to(data.contents, tuple(d for d in dims if d is not None)))
    data = reshape_to(node, data, tuple(have))
    if all(node.symbols.equal(h, d) for h, d in zip(have, dims)):
        return data
    kept = [node.symbols.equal(h, d) for h, d in zip(have, dims)]

    def element(index: Any, x: Any, *sizes: Any) -> Any:
        # The only element of a dimension of size 1 stands for all; what has the size already is not changed by min.
        return x(*(i if same else tirx.min(i, n - 1) for i, n, same in zip(index, sizes, kept)))

    return compute(node, "expand", element, [data], tuple(dims), have)


def _broadcast_size(node: Node, have: Size, want: Size | None) -> Size | None:
    """The size of two that broadcast, where either may be 1; None where only the run decides."""
    if want is None:
        return None
    if isinstance(have, int) and isinstance(want, int) and 1 not in (have, want) and have != want:
        raise node.error(f"size {have} of the data does not broadcast to {want}.")
    if node.symbols.equal(have, 1):
        return want
    if node.symbols.equal(want, 1) or node.symbols.equal(have, want):
        return have
    return next((s for s in (have, want) if isinstance(s, int)), None)


def _broadcast_at_run_time(
    node: Node,
    shape: Value,
    data_dependent: bool,
    have: list[Size],
    want: list[Size],
    axes: list[int],
    beside: tuple[Shape, str],
) -> list[Any]:
    if not axes:
        return []
    tensors = [node.emit(relax.op.astype(node.tensor(shape), "int64"))] if data_dependent else []
    missing = len(have) - shape.shape[0]
    for axis in axes:
        if want[axis] is not None:
            node.importer.expect(symbolic.equal(have[axis], want[axis]))

    def dims(*target: Any) -> list[Any]:
        result = []
        for axis in axes:
            h = have[axis] * tirx.IntImm("int64", 1)
            w = target[0][axis - missing] if data_dependent else want[axis]
            legal = tirx.Or(h == w, tirx.Or(h == 1, w == 1))
            text = f"{node.where}: dimension {axis} of the data does not broadcast to {node.name_of(shape, False)}."
            with T.Assert(legal, text, "ValueError"):
                pass
            result.append(tirx.Select(h == 1, w, h))
        return result

    used = [s for s in (*have, *want) if s is not None]
    return bind(node, compute_sizes(node, "expand_dims", len(axes), dims, tensors, used), beside, of=shape)


@op("Tile", since=6)
def tile(node: Node, data: Value, repeats: Value) -> Value:
    if repeats.rank != 1 or (isinstance(repeats.shape[0], int) and repeats.shape[0] != data.rank):
        raise node.error(f"input repeats is {list(repeats.shape)}, for data of rank {data.rank}.", "Give one for each.")
    repeats = asserted(node, repeats, (data.rank,))
    known = sizes(repeats)
    times = bind(node, repeats, (data.shape, data.dtype)) if known is None else known
    data = no_negative(node, data, times, node.name_of(repeats, False))
    shape = tuple(node.simplify(d * t) for d, t in zip(data.shape, times))
    if movable(data) and few(shape) and all(isinstance(t, int) for t in times):
        assert data.contents is not None
        return moved(node, data, np.tile(data.contents, times))
    once = [isinstance(t, int) and t == 1 for t in times]

    def element(index: Any, x: Any, *dims: Any) -> Any:
        one = tirx.IntImm("int64", 1)
        periods = [tirx.max(d * one, one) for d in dims]  # a size of 0 has no index, but proofs divide by it
        return x(*(i if single else tirx.floormod(i, period) for i, period, single in zip(index, periods, once)))

    return compute(node, "tile", element, [data], shape, data.shape)


@op("Where", since=9)
def where(node: Node, condition: Value, a: Value, b: Value) -> Value:
    known = symbolic.elementwise(node, symbolic.where, condition, a, b, dtype=a.dtype)
    if known is not None:
        return known
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
    if data.rank < 2:
        raise node.error(f"the input has rank {data.rank}.", "Make it a matrix, or a stack of them.")
    offset = [0] if k is None else sizes(k)
    far = tirx.IntImm("int64", _FAR)
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
    axis = static_axis(node, node.attr("axis", -1), indices.rank + 1)
    count = sizes(depth)
    if count is None:
        wide = node.emit(relax.op.astype(node.tensor(reshape_to(node, depth, (1,))), "int64"))
        count = bind(node, wide, (indices.shape, values.dtype), of=depth)
    values = asserted(node, no_negative(node, values, count, node.name_of(depth, False)), (2,))
    shape = (*indices.shape[:axis], count[0], *indices.shape[axis:])

    def element(index: Any, at: Any, pair: Any, size: Any) -> Any:
        place = at(*index[:axis], *index[axis + 1 :]).astype("int64")
        place = tirx.Select(place < 0, place + size, place)
        return tirx.Select(place == index[axis], pair(1), pair(0))

    return compute(node, "one_hot", element, [indices, values], shape, [count[0]], values.dtype)


@op("ReverseSequence", since=10)
def reverse_sequence(node: Node, data: Value, lengths: Value) -> Value:
    batch, time = node.attr("batch_axis", 1), node.attr("time_axis", 0)
    if {batch, time} != {0, 1} or data.rank < 2 or lengths.rank != 1:
        what = f"attributes batch_axis and time_axis are {batch} and {time}, the inputs have ranks {data.rank} and"
        raise node.error(f"{what} {lengths.rank}.", "The axes are 0 and 1 of data, and the lengths a vector.")
    lengths = asserted(node, lengths, (data.shape[batch],))
    of = f"the length of {node.name_of(data, False)}"
    lengths = inside(node, lengths, node.simplify(data.shape[time] + 1), of=of, from_the_back=False)

    def element(index: Any, x: Any, length: Any) -> Any:
        n, i = length(index[batch]).astype("int64"), index[time]
        place = list(index)
        place[time] = tirx.Select(i < n, n - 1 - i, i)
        return x(*place)

    return compute(node, "reverse_sequence", element, [data, lengths], data.shape)


@op("DepthToSpace", since=1)
def depth_to_space(node: Node, data: Value) -> Value:
    b, mode = _block_size(node, data), node.attr("mode", "DCR")
    n, c, h, w = data.shape
    depth = _divided(node, c, b * b)
    if mode == "DCR":
        data = permute(node, reshape_to(node, data, (n, b, b, depth, h, w)), [0, 3, 4, 1, 5, 2])
    else:
        data = permute(node, reshape_to(node, data, (n, depth, b, b, h, w)), [0, 1, 4, 2, 5, 3])
    return reshape_to(node, data, (n, depth, h * b, w * b))


@op("SpaceToDepth", since=1)
def space_to_depth(node: Node, data: Value) -> Value:
    b = _block_size(node, data)
    n, c, h, w = data.shape
    rows, columns = _divided(node, h, b), _divided(node, w, b)
    order = [0, 3, 5, 1, 2, 4] if node.attr("mode", "DCR") == "DCR" else [0, 1, 3, 5, 2, 4]
    data = permute(node, reshape_to(node, data, (n, c, rows, b, columns, b)), order)
    return reshape_to(node, data, (n, c * b * b, rows, columns))


_LARGEST_BLOCK = 2**20  # no dimension is larger than its square


def _block_size(node: Node, data: Value) -> int:
    size = int(node.attr("blocksize"))
    if data.rank != 4 or not 1 <= size <= _LARGEST_BLOCK:
        raise node.error(
            f"attribute blocksize is {size}, and the input of rank {data.rank}.",
            f"Use rank 4, and 1 to {_LARGEST_BLOCK}.",
        )
    return size


def _divided(node: Node, size: Size, by: int) -> Size:
    if isinstance(size, int):
        if size % by:
            raise node.error(f"size {size} is not divisible by {by}, as attribute blocksize asks.")
        return size // by
    return node.simplify(tirx.floordiv(size, tirx.IntImm("int64", by)))
