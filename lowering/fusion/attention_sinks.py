"""Sinks written out: one more column of scores, which takes its share of the softmax and is left out behind it.

Before: Slice(Softmax(Concat(scores, sink)), all columns but the sink's). After: the sinks are an input of Attention
(attention_node.py). The cases are those of FuseAttentionPass.

1. The column lies behind the scores or in front of them. Slice leaves it out, or Split.
2. The largest score is subtracted before the softmax, of scores with or without a sink.
3. The sink is a vector in any shape that broadcasts as [1, Hq, 1, 1], or [1, Hkv, G, 1, 1], behind Expand or Tile or
   not; or one number for all heads, also by ConstantOfShape.
4. Masks are added and scales multiplied, by known numbers, before the Concat or after it. A mask that is added after
   it has a column of zeros, by Concat or Pad, where the sink is; a later scale is that of the sink, too.

A sink for each row or batch, more columns than one, or another part of the probabilities refuses the match.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from .attention_masks import Mask, Masks
from .matching import (
    Rewrite,
    Size,
    array,
    attribute,
    dims,
    integers,
    is_op,
    number,
    numbers,
    operand,
    pairs,
    producer,
    widens,
)


@dataclass(frozen=True)
class Sink:
    """The sink's column, which is multiplied by `scale`, and what was found between it and the softmax.

    `scores` are the other columns, which `masks` are added to.
    """

    scores: ir.Value
    column: ir.Value
    is_behind: bool
    nodes: tuple[ir.Node, ...]
    scale: float = 1.0
    masks: Masks = field(default_factory=Masks)

    def emit_vector(self, new: Rewrite, heads: int, dtype: ir.DataType) -> ir.Value:
        """Case 3: the sinks [Hq] in that type; `has_heads` has proven the sizes."""
        source = _before_copies(self.column)
        constant = _filled_with(source)
        if constant is not None:
            return new.constant(np.full(heads, constant * self.scale), dtype)
        count = _heads_of(source)
        vector = new.emit("Reshape", [source, new.integers(-1)], shape=[count])
        if count != heads:
            vector = new.emit("Expand", [vector, new.integers(heads)], shape=[heads])
        if self.scale != 1.0:
            assert vector.dtype is not None
            factor = new.constant(np.array(self.scale), vector.dtype)
            vector = new.emit("Mul", [vector, factor], shape=[heads])
        return new.cast(vector, dtype)

    def has_heads(self, heads: Size) -> bool:
        """Case 3: whether the column is one number for each of so many heads, or for all."""
        source = _before_copies(self.column)
        if _filled_with(source) is not None:
            return True
        return _heads_of(source) in (1, heads)


def find_subtracted_maximum(value: ir.Value) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Case 2: the scores before their largest was subtracted, and the nodes that did it; or the value itself."""
    minus = producer(value, "Sub")
    largest = producer(operand(minus, 1), "ReduceMax") if minus is not None else None
    if minus is None or largest is None or operand(largest, 0) is not operand(minus, 0):
        return value, ()
    rank = len(dims(value))
    axes = integers(largest, 1, "axes")
    if axes is None or [axis % rank for axis in axes] != [rank - 1] or not attribute(largest, "keepdims", 1):
        return value, ()
    return operand(minus, 0), (minus, largest)


def find_sink(value: ir.Value) -> Sink | None:
    """Cases 1, 3 and 4: what a softmax is of, read backwards to the Concat."""
    node = value.producer()
    if node is None:
        return None
    if is_op(node, "Concat"):
        return _joined(node)
    for inner, other in _steps(node):
        found = find_sink(inner)
        if found is None:
            continue
        found = replace(found, nodes=(*found.nodes, node))
        if other is None:
            return found
        if is_op(node, "Add"):
            mask = _before_zeros(other, found.is_behind)
            return None if mask is None else replace(found, masks=found.masks.added(Mask(mask, len(dims(value)))))
        factor = number(other)
        if factor is None or not factor > 0:
            return None
        return _scaled(found, factor if is_op(node, "Mul") else 1 / factor)
    return None


def leaves_out_sink(node: ir.Node, sink: Sink) -> bool:
    """Case 1: whether the result of a Slice, or the only one of a Split that is read, is all columns but the sink's."""
    rank, keys = len(dims(operand(node, 0))), dims(sink.scores)[-1]
    if is_op(node, "Split"):
        if len(node.outputs) != 2:
            return False
        rest, column = node.outputs if sink.is_behind else node.outputs[::-1]
        return attribute(node, "axis", 0) % rank == rank - 1 and bool(rest.uses()) and _is_column(column)
    starts, ends, axes, steps = (
        integers(node, k, name) for k, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    has_steps = len(node.inputs) > 4 and node.inputs[4] is not None
    if axes is None or [axis % rank for axis in axes] != [rank - 1] or (has_steps and steps != [1]):
        return False
    if starts != ([0] if sink.is_behind else [1]):
        return False
    if dims(node.outputs[0])[-1] == keys:
        return True
    return ends == [-1] if sink.is_behind else ends is not None and ends[0] >= np.iinfo(np.int32).max


def _joined(node: ir.Node) -> Sink | None:
    rank = len(dims(node.outputs[0]))
    if len(node.inputs) != 2 or rank not in (4, 5) or attribute(node, "axis", 0) % rank != rank - 1:
        return None
    for place in (1, 0):
        column, scores = operand(node, place), operand(node, 1 - place)
        if _is_column(column) and not _is_column(scores):
            return Sink(scores, column, place == 1, (node,))
    return None


def _steps(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value | None]]:
    """Ways to read on backwards, and what was added or multiplied on the way."""
    if is_op(node, "Cast") and widens(node):
        yield operand(node, 0), None
    elif is_op(node, "Add", "Mul"):
        yield from pairs(node)
    elif is_op(node, "Div"):
        yield operand(node, 0), operand(node, 1)


def _scaled(sink: Sink, factor: float) -> Sink:
    masks = replace(sink.masks, masks=tuple(replace(m, scale=m.scale * factor) for m in sink.masks.masks))
    return replace(sink, scale=sink.scale * factor, masks=masks)


def _before_zeros(mask: ir.Value, is_behind: bool) -> ir.Value | None:
    """Case 4: a mask without the column of zeros where the sink is; None where it has none."""
    node = producer(mask, "Concat", "Pad")
    rank = len(dims(mask))
    if node is None or not rank:
        return None
    if is_op(node, "Concat"):
        if len(node.inputs) != 2 or attribute(node, "axis", 0) % rank != rank - 1:
            return None
        inner, column = operand(node, 1 - is_behind), operand(node, int(is_behind))
        return inner if _is_column(column) and _filled_with(_before_copies(column)) == 0 else None
    widths = integers(node, 1, "pads")
    wanted = [0] * (2 * rank)
    wanted[2 * rank - 1 if is_behind else rank - 1] = 1
    has_axes = len(node.inputs) > 3 and node.inputs[3] is not None
    fill = node.inputs[2] if len(node.inputs) > 2 else None
    is_zero = fill is None or number(fill) == 0
    plain = attribute(node, "mode", "constant") == "constant" and not has_axes
    return operand(node, 0) if plain and widths == wanted and is_zero else None


def _heads_of(column: ir.Value) -> int:
    """How many heads a column has a number for, if it is [1, H, 1, 1] or [1, Hkv, G, 1, 1]; 0 for another one."""
    sizes: tuple[Size, ...] = ((1,) * max(0, 4 - len(dims(column)))) + dims(column)
    batch, *heads, row, last = sizes
    known = numbers(heads)
    return math.prod(known) if known is not None and (batch, row, last) == (1, 1, 1) else 0


def _is_column(value: ir.Value) -> bool:
    return dims(value)[-1:] == (1,)


def _before_copies(value: ir.Value) -> ir.Value:
    """What Expand and Tile repeat along other axes than that of heads."""
    while (node := producer(value, "Expand", "Tile")) is not None:
        value = operand(node, 0)
    return value


def _filled_with(value: ir.Value) -> float | None:
    """The number that all elements of a known value are."""
    node = producer(value, "ConstantOfShape")
    if node is not None:
        tensor = attribute(node, "value", None)
        return 0.0 if tensor is None else float(tensor.numpy().item())
    elements = array(value)
    if elements is None or elements.dtype.kind not in "iuf" or not elements.size:
        return None
    return float(elements.flat[0]) if (elements == elements.flat[0]).all() else None
