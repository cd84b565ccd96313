"""Channels last: tensors [N, C, D1, ...] that are computed as [N, D1, ..., C].

ONNX has channels in the second place. With channels last a convolution is a matmul whose rows are read
where they are, and vectors run along channels wherever windows slide. So convolutions and pools compute in that order,
and leave their results in it (`Value.channels_last`). What is defined element by element goes on so, and a
transposition stands only where something needs ONNX's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax

from .node import Node
from .values import Shape, Value, is_one


def channels_last_axes(rank: int) -> list[int]:
    """[N, C, D1, ...] to [N, D1, ..., C]."""
    return [0, *range(2, rank), 1]


def channels_second_axes(rank: int) -> list[int]:
    """[N, D1, ..., C] to [N, C, D1, ...]."""
    return [0, rank - 1, *range(1, rank - 1)]


def channels_last(node: Node, value: Value) -> Value:
    """[N, C, D1, ...] as a value [N, D1, ..., C]."""
    shape = tuple(value.shape[axis] for axis in channels_last_axes(value.rank))
    if value.channels_last is not None:
        return node.called(Value(value.dtype, shape, value.channels_last), value)
    if value.contents is not None:
        return Value(value.dtype, shape, contents=np.moveaxis(value.contents, 1, -1))
    if _same_order(value.shape):
        return node.called(node.reshaped(value, shape), value)
    tensor = node.tensor(value)
    source = transposed_from(node, tensor, channels_second_axes(value.rank))
    if source is not None:
        return node.called(Value(value.dtype, shape, source), value)
    moved = relax.op.permute_dims(tensor, channels_last_axes(value.rank))
    return node.called(node.emit(moved, value.dtype), value)


def transposed_from(node: Node, tensor: relax.Expr, axes: list[int]) -> relax.Expr | None:
    """What the model transposed by these axes, if that is how it made the tensor; None else."""
    made = node.importer.builder.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
    if isinstance(made, relax.Call) and made.op == tvm.ir.Op.get("relax.permute_dims"):
        given = made.attrs.axes
        if given is not None and [int(axis) for axis in given] == axes:
            return made.args[0]
    return None


def channels_second(node: Node, value: Value) -> Value:
    """A value [N, D1, ..., C] as [N, C, D1, ...]; what asks for it in that order gets a transposition."""
    shape = (value.shape[0], value.shape[-1], *value.shape[1:-1])
    if _same_order(shape):
        return node.reshaped(value, shape)
    return Value(value.dtype, shape, channels_last=node.tensor(value))


def in_their_order(node: Node, call: Callable[..., Value], values: Sequence[Value]) -> Value:
    """call(*values), of operands that broadcast, element by element; with channels last where more of them are computed
    so than would have to be transposed for it."""
    rank = max(value.rank for value in values)
    last = sum(value.channels_last is not None and value.rank == rank for value in values)
    others = [value for value in values if value.channels_last is None and value.constant is None]
    if not last or sum(not _same_order(_shape(value, rank)) for value in others) > last:
        return call(*values)
    return channels_second(node, call(*(channels_last(node, _padded(node, value, rank)) for value in values)))


def as_computed(node: Node, *values: Value) -> tuple[list[Value], list[int], Callable[[Value], Value]]:
    """Values of one rank in the order in which all of them are computed, which axis of ONNX's is where in it, and what
    brings a result back to ONNX's order."""
    rank = values[0].rank
    if any(value.channels_last is None for value in values):
        return list(values), list(range(rank)), lambda result: result
    last = [channels_last(node, value) for value in values]
    return last, channels_last_axes(rank), lambda result: channels_second(node, result)


def _padded(node: Node, value: Value, rank: int) -> Value:
    """The value with axes of one element in front."""
    if value.rank == rank:
        return value
    shape = _shape(value, rank)
    if value.contents is not None:
        return Value(value.dtype, shape, contents=value.contents.reshape(shape))
    return node.reshaped(value, shape)


def _same_order(shape: Shape) -> bool:
    """Whether elements lie in memory alike in both orders: there is one channel, or one place."""
    return is_one(shape[1]) or all(map(is_one, shape[2:]))


def _shape(value: Value, rank: int) -> Shape:
    return (*[1] * (rank - value.rank), *value.shape)
