"""Attention sinks in primitive operators: a column of scores in the softmax, which is removed after it.

Before: Slice(Softmax(Concat(scores, sink)), all columns but the sink's). After: the sinks are an input of Attention
(attention_node.py). The cases are those of FuseAttentionPass.

1. The column is after the scores or before them. Slice or Split removes it.
2. The largest score is subtracted before the softmax, of scores with or without a sink.
3. The sink is a vector in any shape that broadcasts as [1, Hq, 1, 1], or [1, Hkv, G, 1, 1], optionally after Expand or
   Tile; or one number for all heads, also by ConstantOfShape.
4. Masks are added and scales multiplied, by constants, before the Concat or after it. A mask that is added after it
   has a column of zeros, by Concat or Pad, at the sink; a later scale applies to the sink, too.

The match is rejected for a sink for each row or batch, more than one column, or another slice of the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.matching import (
    Rewrite,
    Size,
    attribute,
    dims,
    is_op,
    is_widening_cast,
    operand,
    operand_orders,
    producer,
    read_array,
    read_integers,
    read_number,
    read_static_sizes,
)
from .attention_masks import ScoreMask, ScoreMasks


@dataclass(frozen=True)
class AttentionSink:
    """The column of a sink, multiplied by `scale`, and the nodes between it and the softmax.

    `scores` are the other columns; `masks` are added to them.
    """

    scores: ir.Value
    column: ir.Value
    is_trailing: bool
    nodes: tuple[ir.Node, ...]
    scale: float = 1.0
    masks: ScoreMasks = field(default_factory=ScoreMasks)

    def emit_vector(self, new: Rewrite, heads: int, dtype: ir.DataType) -> ir.Value:
        """Emit case 3: the sinks [Hq] in that type; `has_heads` has proven the sizes."""
        source = _find_unrepeated(self.column)
        constant = _read_fill(source)
        if constant is not None:
            return new.emit_constant(np.full(heads, constant * self.scale), dtype)
        count = _count_heads(source)
        vector = new.emit("Reshape", [source, new.emit_integers(-1)], shape=[count])
        if count != heads:
            vector = new.emit("Expand", [vector, new.emit_integers(heads)], shape=[heads])
        if self.scale != 1.0:
            assert vector.dtype is not None
            factor = new.emit_constant(np.array(self.scale), vector.dtype)
            vector = new.emit("Mul", [vector, factor], shape=[heads])
        return new.emit_cast(vector, dtype)

    def has_heads(self, heads: Size) -> bool:
        """Match case 3: return whether the column is one number for each of `heads` heads, or for all."""
        source = _find_unrepeated(self.column)
        if _read_fill(source) is not None:
            return True
        return _count_heads(source) in (1, heads)


def find_subtracted_maximum(value: ir.Value) -> tuple[ir.Value, tuple[ir.Node, ...]]:
    """Match case 2: return the scores before their largest was subtracted, and the nodes that did it.

    Any other value is returned as it is.
    """
    minus = producer(value, "Sub")
    largest = producer(operand(minus, 1), "ReduceMax") if minus is not None else None
    if minus is None or largest is None or operand(largest, 0) is not operand(minus, 0):
        return value, ()
    rank = len(dims(value))
    axes = read_integers(largest, 1, "axes")
    if axes is None or [axis % rank for axis in axes] != [rank - 1] or not attribute(largest, "keepdims", 1):
        return value, ()
    return operand(minus, 0), (minus, largest)


def find_sink(value: ir.Value) -> AttentionSink | None:
    """Match cases 1, 3 and 4: read the input of a softmax backwards to the Concat."""
    node = value.producer()
    if node is None:
        return None
    if is_op(node, "Concat"):
        return _read_concat(node)
    for inner, other in _iterate_inputs(node):
        sink = find_sink(inner)
        if sink is None:
            continue
        sink = replace(sink, nodes=(*sink.nodes, node))
        if other is None:
            return sink
        if is_op(node, "Add"):
            mask = _remove_zero_column(other, sink.is_trailing)
            return None if mask is None else replace(sink, masks=sink.masks.add(ScoreMask(mask, len(dims(value)))))
        factor = read_number(other)
        if factor is None or not factor > 0:
            return None
        return _scale_sink(sink, factor if is_op(node, "Mul") else 1 / factor)
    return None


def is_sink_removal(node: ir.Node, sink: AttentionSink) -> bool:
    """Match case 1: return whether a Slice or Split returns all columns but the sink's.

    For a Split this is the only output that is read.
    """
    rank, keys = len(dims(operand(node, 0))), dims(sink.scores)[-1]
    if is_op(node, "Split"):
        if len(node.outputs) != 2:
            return False
        scores, column = node.outputs if sink.is_trailing else node.outputs[::-1]
        return attribute(node, "axis", 0) % rank == rank - 1 and bool(scores.uses()) and _is_column(column)
    starts, ends, axes, steps = (
        read_integers(node, k, name) for k, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    has_steps = len(node.inputs) > 4 and node.inputs[4] is not None
    if axes is None or [axis % rank for axis in axes] != [rank - 1] or (has_steps and steps != [1]):
        return False
    if starts != ([0] if sink.is_trailing else [1]):
        return False
    if dims(node.outputs[0])[-1] == keys:
        return True
    return ends == [-1] if sink.is_trailing else ends is not None and ends[0] >= np.iinfo(np.int32).max


def _read_concat(node: ir.Node) -> AttentionSink | None:
    rank = len(dims(node.outputs[0]))
    if len(node.inputs) != 2 or rank not in (4, 5) or attribute(node, "axis", 0) % rank != rank - 1:
        return None
    for position in (1, 0):
        column, scores = operand(node, position), operand(node, 1 - position)
        if _is_column(column) and not _is_column(scores):
            return AttentionSink(scores, column, position == 1, (node,))
    return None


def _iterate_inputs(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value | None]]:
    """Yield the inputs to read further backwards, with the summand or factor of each."""
    if is_op(node, "Cast") and is_widening_cast(node):
        yield operand(node, 0), None
    elif is_op(node, "Add", "Mul"):
        yield from operand_orders(node)
    elif is_op(node, "Div"):
        yield operand(node, 0), operand(node, 1)


def _scale_sink(sink: AttentionSink, factor: float) -> AttentionSink:
    masks = replace(sink.masks, masks=tuple(replace(m, scale=m.scale * factor) for m in sink.masks.masks))
    return replace(sink, scale=sink.scale * factor, masks=masks)


def _remove_zero_column(mask: ir.Value, is_trailing: bool) -> ir.Value | None:
    """Match case 4: return a mask without the column of zeros at the sink; None if it has none."""
    node = producer(mask, "Concat", "Pad")
    rank = len(dims(mask))
    if node is None or not rank:
        return None
    if is_op(node, "Concat"):
        if len(node.inputs) != 2 or attribute(node, "axis", 0) % rank != rank - 1:
            return None
        inner, column = operand(node, 1 - is_trailing), operand(node, int(is_trailing))
        return inner if _is_column(column) and _read_fill(_find_unrepeated(column)) == 0 else None
    widths = read_integers(node, 1, "pads")
    expected = [0] * (2 * rank)
    expected[2 * rank - 1 if is_trailing else rank - 1] = 1
    has_axes = len(node.inputs) > 3 and node.inputs[3] is not None
    fill = node.inputs[2] if len(node.inputs) > 2 else None
    is_zero = fill is None or read_number(fill) == 0
    is_plain = attribute(node, "mode", "constant") == "constant" and not has_axes
    return operand(node, 0) if is_plain and widths == expected and is_zero else None


def _count_heads(column: ir.Value) -> int:
    """Return the number of heads of a column [1, H, 1, 1] or [1, Hkv, G, 1, 1]; 0 for any other."""
    sizes: tuple[Size, ...] = ((1,) * max(0, 4 - len(dims(column)))) + dims(column)
    batch, *heads, row, last = sizes
    static_heads = read_static_sizes(heads)
    return math.prod(static_heads) if static_heads is not None and (batch, row, last) == (1, 1, 1) else 0


def _is_column(value: ir.Value) -> bool:
    return dims(value)[-1:] == (1,)


def _find_unrepeated(value: ir.Value) -> ir.Value:
    """Return the value that Expand and Tile repeat along axes other than that of the heads."""
    while (node := producer(value, "Expand", "Tile")) is not None:
        value = operand(node, 0)
    return value


def _read_fill(value: ir.Value) -> float | None:
    """Return the number that all elements of a constant value equal."""
    node = producer(value, "ConstantOfShape")
    if node is not None:
        tensor = attribute(node, "value", None)
        return 0.0 if tensor is None else float(tensor.numpy().item())
    elements = read_array(value)
    if elements is None or elements.dtype.kind not in "iuf" or not elements.size:
        return None
    return float(elements.flat[0]) if (elements == elements.flat[0]).all() else None
