"""Tables of cosines and sines that contain every angle twice, which RotaryEmbedding does not accept."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, attribute, dims, is_op, operand, read_array, read_integers

_MAX_DEPTH = 24  # more nodes than lie between any table and its use

# Operators whose last axis is that of the first input.
_LAST_AXIS_OPERATORS = frozenset(
    (
        *("Cos", "Sin", "Cast", "Neg", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Slice", "Transpose"),
        *("Gather", "GatherND"),
    )
)


def has_doubled_angles(value: ir.Value, interleaved: bool) -> bool:
    """Return whether the last axis provably contains each number twice.

    The copies are half the axis apart, or adjacent if interleaved.
    """
    size = dims(value)[-1] if dims(value) else 1
    return isinstance(size, int) and size % 2 == 0 and _is_doubled(value, interleaved, _MAX_DEPTH)


def emit_distinct_angles(new: Rewrite, value: ir.Value, interleaved: bool) -> ir.Value:
    """Return the distinct numbers of a value that contains each twice."""
    *rows, size = dims(value)
    assert isinstance(size, int)
    stop, step = (size, 2) if interleaved else (size // 2, 1)
    bounds = [new.emit_integers(bound) for bound in (0, stop, len(rows), step)]
    return new.emit("Slice", [value, *bounds], shape=(*rows, size // 2))


def _is_doubled(value: ir.Value, interleaved: bool, depth: int) -> bool:
    size, node = dims(value)[-1] if dims(value) else 1, value.producer()
    elements = read_array(value)
    if elements is not None:
        return elements.ndim > 0 and elements.shape[-1] % 2 == 0 and _are_elements_doubled(elements, interleaved)
    if depth == 0 or node is None or node.domain not in ("", "ai.onnx") or not isinstance(size, int) or size < 2:
        return False
    if is_op(node, "Reshape", "Concat", "Tile") and _is_doubling_node(node, interleaved):
        return True
    if is_op(node, "Mul", "Div", "Add", "Sub"):
        inputs = [operand(node, k) for k in (0, 1)]
        return all(dims(x)[-1:] in ((), (1,)) or _is_doubled(x, interleaved, depth - 1) for x in inputs)
    if is_op(node, "Concat") and attribute(node, "axis", 0) % len(dims(value)) != len(dims(value)) - 1:
        return all(x is not None and _is_doubled(x, interleaved, depth - 1) for x in node.inputs)
    data = operand(node, 0) if node.op_type in _LAST_AXIS_OPERATORS else None
    return data is not None and _has_whole_rows(node) and _is_doubled(data, interleaved, depth - 1)


def _are_elements_doubled(elements: np.ndarray, interleaved: bool) -> bool:
    if interleaved:
        return np.array_equal(elements[..., ::2], elements[..., 1::2])
    half = elements.shape[-1] // 2
    return np.array_equal(elements[..., :half], elements[..., half:])


def _is_doubling_node(node: ir.Node, interleaved: bool) -> bool:
    """Match Concat(f, f) and Tile for halves; a new axis of two copies, flattened, for both layouts."""
    shape = dims(node.outputs[0])
    if is_op(node, "Concat"):
        is_last = attribute(node, "axis", 0) % len(shape) == len(shape) - 1
        return not interleaved and is_last and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    if is_op(node, "Tile"):
        repeats = read_integers(node, 1, "repeats")
        return not interleaved and repeats is not None and repeats[-1] == 2
    expanded = operand(node, 0)
    copies = expanded.producer()
    if not is_op(copies, "Expand", "Tile", "Concat"):
        return False
    assert copies is not None
    if is_op(copies, "Concat") and any(x is not copies.inputs[0] for x in copies.inputs):
        return False
    narrow_shape, full_shape, size = dims(operand(copies, 0)), dims(expanded), shape[-1]
    assert isinstance(size, int)
    if interleaved:
        return narrow_shape[-2:] == (size // 2, 1) and full_shape[-2:] == (size // 2, 2)
    return narrow_shape[-2:] == (1, size // 2) and full_shape[-2:] == (2, size // 2)


def _has_whole_rows(node: ir.Node) -> bool:
    """Return whether the result consists of whole rows of the first input."""
    data, result = dims(operand(node, 0)), dims(node.outputs[0])
    rank = len(data)
    if not rank or data[-1] != result[-1]:
        return False
    if is_op(node, "Transpose"):
        return list(attribute(node, "perm", ()))[-1:] == [rank - 1]
    if is_op(node, "Gather"):
        return attribute(node, "axis", 0) % rank != rank - 1
    if is_op(node, "GatherND"):
        width = dims(operand(node, 1))[-1:]
        return len(width) == 1 and isinstance(width[0], int) and attribute(node, "batch_dims", 0) + width[0] < rank
    if is_op(node, "Slice"):
        axes = read_integers(node, 3, "axes")
        return axes is not None and all(axis % rank != rank - 1 for axis in axes)
    return True
