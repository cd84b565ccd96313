"""Channels-last layout: tensors [N, C, D1, ...] computed as [N, D1, ..., C].

ONNX has channels in the second axis. With channels last a convolution is a matmul that reads its rows without copying
them, and windows slide along contiguous channel vectors. So convolutions and pools compute in that order, and leave
their results in it (`Value.channels_last`). Elementwise operators keep the order, and a transposition is emitted only
where an operator needs ONNX's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from ...importing.node import Node
from ...importing.values import Shape, Value, channels_second_axes, is_one


def channels_last_axes(rank: int) -> list[int]:
    """Return the permutation from [N, C, D1, ...] to [N, D1, ..., C]."""
    return [0, *range(2, rank), 1]


def channels_last(node: Node, value: Value) -> Value:
    """Return a value [N, C, D1, ...] as [N, D1, ..., C]."""
    shape = tuple(value.shape[axis] for axis in channels_last_axes(value.rank))
    if value.channels_last is not None:
        return node.keep_name(Value(value.dtype, shape, value.channels_last), value)
    if value.contents is not None:
        return Value(value.dtype, shape, contents=np.moveaxis(value.contents, 1, -1))
    if _has_same_layout(value.shape):
        return node.keep_name(node.reshape_to(value, shape), value)
    tensor = node.tensor(value)
    source = find_transpose_source(node, tensor, channels_second_axes(value.rank))
    if source is not None:
        return node.keep_name(Value(value.dtype, shape, source), value)
    moved = relax.op.permute_dims(tensor, channels_last_axes(value.rank))
    return node.keep_name(node.emit(moved, value.dtype), value)


def find_transpose_source(node: Node, tensor: relax.Expr, axes: list[int]) -> relax.Expr | None:
    """Return the tensor that the model transposed by these axes into `tensor`, None if it is not a transposition."""
    producer = node.importer.builder.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
    if isinstance(producer, relax.Call) and producer.op == tvm.ir.Op.get("relax.permute_dims"):
        permutation = producer.attrs.axes
        if permutation is not None and [int(axis) for axis in permutation] == axes:
            return producer.args[0]
    return None


def channels_second(node: Node, value: Value) -> Value:
    """Return a value [N, D1, ..., C] as [N, C, D1, ...]; a reader of that order gets a transposition."""
    shape = (value.shape[0], value.shape[-1], *value.shape[1:-1])
    if _has_same_layout(shape):
        return node.reshape_to(value, shape)
    return Value(value.dtype, shape, channels_last=node.tensor(value))


def call_in_common_layout(node: Node, call: Callable[..., Value], values: Sequence[Value]) -> Value:
    """Return call(*values) for an elementwise call of operands that broadcast.

    Channels-last order is used if at least as many operands have it as would have to be transposed to it.
    """
    rank = max(value.rank for value in values)
    aligned_count = sum(value.channels_last is not None and value.rank == rank for value in values)
    misplaced = [value for value in values if value.channels_last is None and value.constant is None]
    if not aligned_count or sum(not _has_same_layout(_pad_shape(value, rank)) for value in misplaced) > aligned_count:
        return call(*values)
    return channels_second(node, call(*(channels_last(node, _pad_rank(node, value, rank)) for value in values)))


def unify_layouts(node: Node, *values: Value) -> tuple[list[Value], list[int], Callable[[Value], Value]]:
    """Return values of one rank in a common layout, the position of each ONNX axis in it, and the way back.

    The layout is channels last if all values are computed in it. The function returned last restores ONNX's order of a
    result.
    """
    rank = values[0].rank
    if any(value.channels_last is None for value in values):
        return list(values), list(range(rank)), lambda result: result
    last = [channels_last(node, value) for value in values]
    return last, channels_last_axes(rank), lambda result: channels_second(node, result)


def _pad_rank(node: Node, value: Value, rank: int) -> Value:
    """Return the value with leading axes of size 1, up to the given rank."""
    if value.rank == rank:
        return value
    shape = _pad_shape(value, rank)
    if value.contents is not None:
        return Value(value.dtype, shape, contents=value.contents.reshape(shape))
    return node.reshape_to(value, shape)


def _has_same_layout(shape: Shape) -> bool:
    """Return whether both orders have the same memory layout: one channel, or one spatial position."""
    return is_one(shape[1]) or all(map(is_one, shape[2:]))


def _pad_shape(value: Value, rank: int) -> Shape:
    return (*[1] * (rank - value.rank), *value.shape)
