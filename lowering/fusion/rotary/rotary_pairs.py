"""The pairs of dimensions that a rotation rotates: how they are sliced out of a head and concatenated again."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ...graph.rewriting.matching import (
    attribute,
    dims,
    is_op,
    operand,
    operand_orders,
    producer,
    read_integers,
    read_number,
)


@dataclass(frozen=True)
class AxisSlice:
    """source[..., start:stop:step] of a last axis of static size."""

    source: ir.Value
    start: int
    stop: int
    step: int

    def is_first(self, interleaved: bool) -> bool:
        """Return whether these are the first elements of all pairs."""
        axis_size = _last_size(self.source)
        return self._selects(0, axis_size, 2) if interleaved else self._selects(0, axis_size // 2, 1)

    def is_second(self, interleaved: bool) -> bool:
        axis_size = _last_size(self.source)
        return self._selects(1, axis_size, 2) if interleaved else self._selects(axis_size // 2, axis_size, 1)

    def _selects(self, start: int, stop: int, step: int) -> bool:
        size = _last_size(self.source)
        selected, expected = range(self.start, self.stop, self.step), range(start, stop, step)
        return size > 0 and size % 2 == 0 and selected == expected


@dataclass(frozen=True)
class ConcatenatedHalves:
    """Two slices put together: one after the other, or element by element if interleaved."""

    halves: tuple[ir.Value, ir.Value]
    is_interleaved: bool
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class RotatedPairs:
    """(-x2, x1) for the pairs (x1, x2) of x."""

    x: ir.Value
    is_interleaved: bool
    nodes: tuple[ir.Node, ...]


def read_slice(value: ir.Value) -> AxisSlice | None:
    """Return a Slice or an output of Split along the last axis, or a column of pairs.

    Such a column is one of two columns (rows) of x reshaped to [.., n, 2] ([.., 2, n]).
    """
    node = producer(value, "Slice", "Split", "Gather", "Squeeze")
    if node is None:
        return None
    if is_op(node, "Slice"):
        return _read_slice_node(node)
    if is_op(node, "Split"):
        return _read_split(node, value)
    return _read_column(node)


def _read_slice_node(node: ir.Node) -> AxisSlice | None:
    source = operand(node, 0)
    size, rank = _last_size(source), len(dims(source))
    if len(node.inputs) < 3 or not size:
        return None
    starts, stops = read_integers(node, 1, "starts"), read_integers(node, 2, "ends")
    axes = read_integers(node, 3, "axes") if len(node.inputs) > 3 and node.inputs[3] is not None else [0]
    steps = read_integers(node, 4, "steps") if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if starts is None or stops is None or axes is None or steps is None or [a % rank for a in axes] != [rank - 1]:
        return None
    return AxisSlice(source, *slice(starts[0], stops[0], steps[0]).indices(size))


def _read_split(node: ir.Node, value: ir.Value) -> AxisSlice | None:
    source = operand(node, 0)
    size, rank = _last_size(source), len(dims(source))
    lengths = [_last_size(output) for output in node.outputs]
    if not size or attribute(node, "axis", 0) % rank != rank - 1 or sum(lengths) != size:
        return None
    start = sum(lengths[: value.index() or 0])
    return AxisSlice(source, start, start + _last_size(value), 1)


def _read_column(node: ir.Node) -> AxisSlice | None:
    """Match a Gather with one index, or a Squeeze of a Slice or Split of size 1."""
    if is_op(node, "Gather"):
        reshaped, index = operand(node, 0), read_number(node.inputs[1])
        if index is None or len(dims(operand(node, 1))) != 0:
            return None
        axis, position = attribute(node, "axis", 0), int(index)
    else:
        inner, axes = read_slice(operand(node, 0)), read_integers(node, 1, "axes")
        if inner is None or axes is None or len(axes) != 1 or inner.stop - inner.start != 1:
            return None
        reshaped, axis, position = inner.source, axes[0], inner.start
    reshape = producer(reshaped, "Reshape")
    if reshape is None:
        return None
    source, shape = operand(reshape, 0), dims(reshaped)
    size, rank = _last_size(source), len(shape)
    if len(dims(source)) != rank - 1 or shape[:-2] != dims(source)[:-1] or not size:
        return None
    position %= 2
    if shape[-2:] == (size // 2, 2) and axis % rank == rank - 1:
        return AxisSlice(source, position, size, 2)
    if shape[-2:] == (2, size // 2) and axis % rank == rank - 2:
        return AxisSlice(source, position * size // 2, (position + 1) * size // 2, 1)
    return None


def read_concatenation(node: ir.Node) -> ConcatenatedHalves | None:
    """Match a Concat along the last axis; or a Concat along a new last axis, flattened."""
    if is_op(node, "Concat") and len(node.inputs) == 2:
        rank = len(dims(node.outputs[0]))
        if rank and attribute(node, "axis", 0) % rank == rank - 1:
            return ConcatenatedHalves((operand(node, 0), operand(node, 1)), False, (node,))
    if not is_op(node, "Reshape"):
        return None
    concat = producer(operand(node, 0), "Concat")
    inner = read_concatenation(concat) if concat is not None else None
    columns = [producer(p, "Unsqueeze", "Reshape") for p in inner.halves] if inner is not None else []
    if concat is None or len(columns) != 2 or columns[0] is None or columns[1] is None:
        return None
    a, b = operand(columns[0], 0), operand(columns[1], 0)
    shape = dims(a)
    flat_shape = (*shape[:-1], 2 * _last_size(a))
    if (
        dims(b) != shape
        or dims(concat.outputs[0]) != (*shape, 2)
        or dims(node.outputs[0]) != flat_shape
        or not _last_size(a)
    ):
        return None
    return ConcatenatedHalves((a, b), True, (node, concat, columns[0], columns[1]))


def read_rotated_pairs(value: ir.Value) -> RotatedPairs | None:
    node = value.producer()
    halves = read_concatenation(node) if node is not None else None
    if halves is None:
        return None
    negative = halves.halves[0].producer()
    second = _read_negated(negative) if negative is not None else None
    if second is None or negative is None:
        return None
    a, b = read_slice(halves.halves[1]), read_slice(second)
    if a is None or b is None or a.source is not b.source:
        return None
    if not a.is_first(halves.is_interleaved) or not b.is_second(halves.is_interleaved):
        return None
    return RotatedPairs(a.source, halves.is_interleaved, (*halves.nodes, negative))


def _read_negated(node: ir.Node) -> ir.Value | None:
    """Return x if the node computes -x."""
    if is_op(node, "Neg"):
        return operand(node, 0)
    if is_op(node, "Mul"):
        return next((x for x, c in operand_orders(node) if read_number(c) == -1), None)
    return None


def _last_size(value: ir.Value) -> int:
    """Return the size of the last axis; 0 if it is not static."""
    size = dims(value)[-1] if dims(value) else 0
    return size if isinstance(size, int) else 0
