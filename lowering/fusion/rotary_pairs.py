"""The pairs of dimensions that a rotation turns: how they are taken out of a head and put together again."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from .matching import attribute, dims, integers, is_op, number, operand, pairs, producer


@dataclass(frozen=True)
class Part:
    """source[..., start:stop:step] of a last axis of known size."""

    source: ir.Value
    start: int
    stop: int
    step: int

    def is_first(self, interleaved: bool) -> bool:
        """Whether these are the first of all pairs."""
        size = _last(self.source)
        return self._is(0, size, 2) if interleaved else self._is(0, size // 2, 1)

    def is_second(self, interleaved: bool) -> bool:
        size = _last(self.source)
        return self._is(1, size, 2) if interleaved else self._is(size // 2, size, 1)

    def _is(self, start: int, stop: int, step: int) -> bool:
        last = _last(self.source)
        mine, wanted = range(self.start, self.stop, self.step), range(start, stop, step)
        return last > 0 and last % 2 == 0 and mine == wanted


@dataclass(frozen=True)
class Stacked:
    """Two parts put together: one behind the other, or element by element where interleaved."""

    parts: tuple[ir.Value, ir.Value]
    interleaved: bool
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Turned:
    """(-x2, x1) for the pairs (x1, x2) of x."""

    x: ir.Value
    interleaved: bool
    nodes: tuple[ir.Node, ...]


def part(value: ir.Value) -> Part | None:
    """A Slice or an output of Split along the last axis; or one of two columns (rows) of x reshaped to [.., n, 2]
    ([.., 2, n])."""
    node = producer(value, "Slice", "Split", "Gather", "Squeeze")
    if node is None:
        return None
    if is_op(node, "Slice"):
        return _slice(node)
    if is_op(node, "Split"):
        return _split(node, value)
    return _column(node)


def _slice(node: ir.Node) -> Part | None:
    source = operand(node, 0)
    size, rank = _last(source), len(dims(source))
    if len(node.inputs) < 3 or not size:
        return None
    starts, stops = integers(node, 1, "starts"), integers(node, 2, "ends")
    axes = integers(node, 3, "axes") if len(node.inputs) > 3 and node.inputs[3] is not None else [0]
    steps = integers(node, 4, "steps") if len(node.inputs) > 4 and node.inputs[4] is not None else [1]
    if starts is None or stops is None or axes is None or steps is None or [a % rank for a in axes] != [rank - 1]:
        return None
    return Part(source, *slice(starts[0], stops[0], steps[0]).indices(size))


def _split(node: ir.Node, value: ir.Value) -> Part | None:
    source = operand(node, 0)
    size, rank = _last(source), len(dims(source))
    parts = [_last(output) for output in node.outputs]
    if not size or attribute(node, "axis", 0) % rank != rank - 1 or sum(parts) != size:
        return None
    start = sum(parts[: value.index() or 0])
    return Part(source, start, start + _last(value), 1)


def _column(node: ir.Node) -> Part | None:
    """Gather with one index, or Squeeze of a Slice or Split of size 1."""
    if is_op(node, "Gather"):
        pairs_of, index = operand(node, 0), number(node.inputs[1])
        if index is None or len(dims(operand(node, 1))) != 0:
            return None
        axis, position = attribute(node, "axis", 0), int(index)
    else:
        inner, axes = part(operand(node, 0)), integers(node, 1, "axes")
        if inner is None or axes is None or len(axes) != 1 or inner.stop - inner.start != 1:
            return None
        pairs_of, axis, position = inner.source, axes[0], inner.start
    reshape = producer(pairs_of, "Reshape")
    if reshape is None:
        return None
    source, shape = operand(reshape, 0), dims(pairs_of)
    size, rank = _last(source), len(shape)
    if len(dims(source)) != rank - 1 or shape[:-2] != dims(source)[:-1] or not size:
        return None
    position %= 2
    if shape[-2:] == (size // 2, 2) and axis % rank == rank - 1:
        return Part(source, position, size, 2)
    if shape[-2:] == (2, size // 2) and axis % rank == rank - 2:
        return Part(source, position * size // 2, (position + 1) * size // 2, 1)
    return None


def stacked(node: ir.Node) -> Stacked | None:
    """Concat along the last axis; or Concat along a new last axis, flattened."""
    if is_op(node, "Concat") and len(node.inputs) == 2:
        rank = len(dims(node.outputs[0]))
        if rank and attribute(node, "axis", 0) % rank == rank - 1:
            return Stacked((operand(node, 0), operand(node, 1)), False, (node,))
    if not is_op(node, "Reshape"):
        return None
    concat = producer(operand(node, 0), "Concat")
    inner = stacked(concat) if concat is not None else None
    columns = [producer(p, "Unsqueeze", "Reshape") for p in inner.parts] if inner is not None else []
    if concat is None or len(columns) != 2 or columns[0] is None or columns[1] is None:
        return None
    a, b = operand(columns[0], 0), operand(columns[1], 0)
    shape = dims(a)
    both = (*shape[:-1], 2 * _last(a))
    if dims(b) != shape or dims(concat.outputs[0]) != (*shape, 2) or dims(node.outputs[0]) != both or not _last(a):
        return None
    return Stacked((a, b), True, (node, concat, columns[0], columns[1]))


def rotated_pairs(value: ir.Value) -> Turned | None:
    node = value.producer()
    found = stacked(node) if node is not None else None
    if found is None:
        return None
    negative = found.parts[0].producer()
    second = _negated(negative) if negative is not None else None
    if second is None or negative is None:
        return None
    a, b = part(found.parts[1]), part(second)
    if a is None or b is None or a.source is not b.source:
        return None
    if not a.is_first(found.interleaved) or not b.is_second(found.interleaved):
        return None
    return Turned(a.source, found.interleaved, (*found.nodes, negative))


def _negated(node: ir.Node) -> ir.Value | None:
    """x where the node computes -x."""
    if is_op(node, "Neg"):
        return operand(node, 0)
    if is_op(node, "Mul"):
        return next((x for x, c in pairs(node) if number(c) == -1), None)
    return None


def _last(value: ir.Value) -> int:
    """The size of the last axis; 0 where that is no number."""
    size = dims(value)[-1] if dims(value) else 0
    return size if isinstance(size, int) else 0
