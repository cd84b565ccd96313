"""Sequences and optional values, resolved at import, where a sequence is a list of tensors of static length.

An optional value is its element, as ONNX allows for every optional input. One without an element is an omitted input.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from ...graph.loading.legality import MAX_SEQUENCE_ELEMENTS
from ...importing.node import Node
from ...importing.values import ABSENT, SequenceValue, Size, Value
from .. import op
from ..helpers.assertions import assert_shape
from ..helpers.contents import normalize_axis, read_sizes
from ..helpers.requirements import read_length, require_range, require_same_dtype
from ..helpers.run_time import bind_sizes
from ..tensor.concat import concatenate_values, emit_concat, split_axis
from ..tensor.gather import gather_along
from ..tensor.reshape import reshape_to


def _make_sequence(node: Node, dtype: str, items: Sequence[Value]) -> SequenceValue:
    """Return a sequence of these items, whose number is limited."""
    if len(items) > MAX_SEQUENCE_ELEMENTS:
        raise node.error(
            "node.sequence_too_long", f"its sequence has {len(items)} tensors; the maximum is {MAX_SEQUENCE_ELEMENTS}."
        )
    return SequenceValue(dtype, (), items=tuple(items))


@op("SequenceEmpty", since=11)
def sequence_empty(node: Node) -> Value:
    dtype = node.attr("dtype", onnx.TensorProto.FLOAT)
    if dtype not in onnx.TensorProto.DataType.values()[1:]:
        raise node.error(
            "sequence_empty.dtype_unsupported", f"attribute dtype is {dtype}, which is not an element type."
        )
    if dtype == onnx.TensorProto.STRING:
        return _make_sequence(node, "string", ())
    return _make_sequence(node, onnx.helper.tensor_dtype_to_np_dtype(dtype).name, ())


@op("SequenceConstruct", since=11)
def sequence_construct(node: Node, *items: Value) -> Value:
    return _make_sequence(node, items[0].dtype, items)


@op("SequenceInsert", since=11)
def sequence_insert(node: Node, sequence: SequenceValue, item: Value, position: Value | None = None) -> Value:
    items = list(sequence.items)
    require_same_dtype(node, "tensor", item, "the sequence", sequence, code="sequence_insert.dtype_mismatch")
    index = len(items) if position is None else _read_position(node, position, len(items) + 1, -len(items))
    return _make_sequence(node, sequence.dtype, [*items[:index], item, *items[index:]])


@op("SequenceErase", since=11)
def sequence_erase(node: Node, sequence: SequenceValue, position: Value | None = None) -> Value:
    items, last = list(sequence.items), node.constant(np.asarray(-1))
    del items[_read_position(node, last if position is None else position, len(items), -len(items))]
    return _make_sequence(node, sequence.dtype, items)


@op("SequenceAt", since=11)
def sequence_at(node: Node, sequence: SequenceValue, position: Value) -> Value:
    """Return a tensor of the sequence; with a dynamic position, all tensors have one shape."""
    items = sequence.items
    if position.constant is not None or not items:
        return items[_read_position(node, position, len(items), -len(items))]
    if any(item.rank != items[0].rank for item in items):
        raise node.error(
            "sequence_at.rank_mismatch",
            "the position is computed at run time, and the tensors have the ranks "
            f"{', '.join(str(item.rank) for item in items)}.",
            "Make input position a constant, or give the tensors the same shape.",
        )
    equal_shapes = [
        items[0],
        *(assert_shape(node, item, items[0].shape, "a tensor of the sequence") for item in items[1:]),
    ]
    stacked = emit_concat(node, [reshape_to(node, item, (1, *item.shape)) for item in equal_shapes], 0)
    return gather_along(node, stacked, reshape_to(node, position, ()), 0)


def _read_position(node: Node, position: Value, end: int, lowest: int) -> int:
    """Return a static position, counted from the front, from `lowest` up to `end`."""
    if position.constant is None or position.constant.size != 1:
        raise node.error(
            "node.constant_required",
            "input position is computed at run time, but the order of the sequence must be static.",
            "Make it a constant.",
        )
    index = int(position.constant.reshape(-1)[0])
    if not lowest <= index < end:
        allowed = f"allows {lowest} to {end - 1}" if end else "is empty"
        raise node.error(
            "node.index_out_of_range", f"input position is {index}, and the sequence of {-lowest} tensors {allowed}."
        )
    return index if index >= 0 else index - lowest


@op("SequenceLength", since=11)
def sequence_length(node: Node, sequence: SequenceValue) -> Value:
    return node.constant(np.asarray(len(sequence.items), np.int64))


@op("SplitToSequence", since=11)
def split_to_sequence(node: Node, data: Value, lengths: Value | None = None) -> Value:
    axis = normalize_axis(node, node.attr("axis", 0), data.rank)
    items = split_axis(node, data, axis, _read_lengths(node, data.shape[axis], axis, lengths))
    if lengths is None and not node.attr("keepdims", 1):
        items = [reshape_to(node, item, (*item.shape[:axis], *item.shape[axis + 1 :])) for item in items]
    return _make_sequence(node, data.dtype, items)


def _read_lengths(node: Node, size: Size, axis: int, lengths: Value | None) -> list[Size]:
    """Return the length of each slice of a dimension."""
    if lengths is not None and lengths.rank == 1:
        read_length(node, "split", lengths)
        static_lengths = read_sizes(lengths)
        return bind_sizes(node, lengths) if static_lengths is None else static_lengths
    if lengths is not None and (lengths.rank or lengths.constant is None):
        raise node.error(
            "split_to_sequence.split_unsupported",
            f"input split of rank {lengths.rank} is computed at run time.",
            "Make it a constant scalar, or a vector.",
        )
    length = 1 if lengths is None or lengths.constant is None else int(lengths.constant)
    require_range(node, "split", length, 1)
    if not isinstance(size, int):
        raise node.error(
            "split_to_sequence.static_size_required",
            f"the number of parts depends on dimension {axis}, which is the symbolic size {size}.",
            "Give it a number, with dims= (--dim), or the lengths of all parts as input split.",
        )
    if size > length * MAX_SEQUENCE_ELEMENTS:
        raise node.error(
            "node.sequence_too_long",
            f"its sequence has {-(-size // length)} tensors; the maximum is {MAX_SEQUENCE_ELEMENTS}.",
        )
    return [min(length, size - begin) for begin in range(0, size, length)]


@op("ConcatFromSequence", since=11)
def concat_from_sequence(node: Node, sequence: SequenceValue) -> Value:
    items, is_new = sequence.items, bool(node.attr("new_axis", 0))
    if not items:
        raise node.error(
            "concat_from_sequence.sequence_empty", "its sequence is empty, so the shape of the result is unknown."
        )
    if any(item.rank != items[0].rank for item in items):
        raise node.error("node.rank_mismatch", f"the tensors have different ranks: {[item.rank for item in items]}.")
    axis = normalize_axis(node, node.attr("axis"), items[0].rank + is_new)
    if is_new:
        items = tuple(reshape_to(node, item, (*item.shape[:axis], 1, *item.shape[axis:])) for item in items)
    return concatenate_values(node, items, axis)


@op("Optional", since=15)
def optional(node: Node, element: Value | None = None) -> Value:
    return ABSENT if element is None else element


@op("OptionalHasElement", since=15)
def optional_has_element(node: Node, value: Value | None = None) -> Value:
    return node.constant(np.asarray(value is not None))


@op("OptionalGetElement", since=15)
def optional_get_element(node: Node, value: Value) -> Value:
    return value
