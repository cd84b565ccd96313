"""Removal of the repetition of keys and values for the query heads of their group.

The Attention node then reads them unrepeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.attention_node import PAST_KEY, PAST_VALUE, is_attention
from ...graph.rewriting.matching import Rewrite, Size, attribute, dims, is_op, operand, producer, read_array
from ...graph.rewriting.opset import ATTENTION_OPSET
from ..node_pass import NodePass


class GroupHeadsPass(NodePass):
    """Removal of a repetition of K and V [B, Hkv, T, D] to [B, Hq, T, D] before Attention.

    Query head h reads key head h // G, so only h0 h0 h1 h1 ... is undone. The heads are on axis 1, or on axis 2 before
    a Transpose [0, 2, 1, 3].

    1. Unsqueeze after the heads, Expand or Tile by G, Reshape.
    2. Gather along the heads with constant indices.
    3. One head for all: Expand, Tile or Concat of it with itself, in any order.

    The match is rejected for the other order, h0 h1 h0 h1: the new axis before the heads, or Tile of more than one
    head. It is also rejected for K and V repeated differently, a present or past key, head counts as attributes,
    and inputs of three dimensions.
    """

    since = ATTENTION_OPSET

    def rewrite(self, node: ir.Node) -> bool:
        return is_attention(node) and _try_group(node)


def _try_group(node: ir.Node) -> bool:
    k, v = operand(node, 1), operand(node, 2)
    if len(dims(k)) != 4 or len(dims(v)) != 4 or any(x is not None for x in node.inputs[PAST_KEY : PAST_VALUE + 1]):
        return False
    if "kv_num_heads" in node.attributes or "q_num_heads" in node.attributes:
        return False
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:3]):
        return False
    k_heads, v_heads = _find_repeated_heads(k), _find_repeated_heads(v)
    if k_heads is None or v_heads is None or k_heads.heads != v_heads.heads or dims(k)[1] != dims(v)[1]:
        return False
    for position, repeated, heads in ((1, k, k_heads), (2, v, v_heads)):
        x = heads.value
        if heads.axis == 2:
            new = Rewrite(_read_producer(repeated))
            x = new.emit_transpose(x, [0, 2, 1, 3])
            new.insert()
        _redirect_shape_readers(x, repeated)
        node.replace_input_with(position, x)
    return True


def _read_producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _redirect_shape_readers(x: ir.Value, repeated: ir.Value) -> None:
    """Let readers of the shape of the repeated keys read that of the unrepeated ones.

    The repeated ones then need not be computed.
    """
    for use in repeated.uses():
        if is_op(use.node, "Shape") and attribute(use.node, "start", 0) >= 2 and dims(x)[2:] == dims(repeated)[2:]:
            use.node.replace_input_with(0, x)


@dataclass(frozen=True)
class _RepeatedHeads:
    """Keys or values before they were repeated along an axis."""

    value: ir.Value
    axis: int

    @property
    def heads(self) -> Size:
        return dims(self.value)[self.axis]


def _find_repeated_heads(value: ir.Value) -> _RepeatedHeads | None:
    transpose = producer(value, "Transpose")
    if transpose is not None and list(attribute(transpose, "perm", ())) == [0, 2, 1, 3]:
        value, axis = operand(transpose, 0), 2
    else:
        axis = 1
    node = producer(value, "Reshape", "Gather", "Expand", "Tile", "Concat")
    if node is None:
        return None
    if is_op(node, "Reshape"):
        x = _find_source_of_expansion(operand(node, 0), axis)
    elif is_op(node, "Gather"):
        x = operand(node, 0) if _is_group_gather(node, axis) else None
    else:
        x = operand(node, 0) if dims(operand(node, 0))[axis : axis + 1] == (1,) and _is_copy(node) else None
    if x is None or len(dims(x)) != 4:
        return None
    rest = [shape[:axis] + shape[axis + 1 :] for shape in (dims(x), dims(value))]
    heads, all_heads = dims(x)[axis], dims(value)[axis]
    if rest[0] != rest[1] or not isinstance(heads, int) or not isinstance(all_heads, int) or all_heads % heads:
        return None
    return _RepeatedHeads(x, axis)


def _find_source_of_expansion(expanded: ir.Value, axis: int) -> ir.Value | None:
    """Match case 1: return X if `expanded` is X [.., Hkv, ..] with G copies on a new axis after the heads."""
    repeat = producer(expanded, "Expand", "Tile", "Concat")
    unrepeated = operand(repeat, 0) if repeat is not None and _is_copy(repeat) else None
    unsqueeze = producer(unrepeated, "Unsqueeze", "Reshape")
    if unrepeated is None or unsqueeze is None:
        return None
    x, new = operand(unsqueeze, 0), axis + 1
    source_shape, full_shape = dims(unrepeated), dims(expanded)
    if len(source_shape) != 5 or source_shape[new] != 1 or source_shape[:new] + source_shape[new + 1 :] != dims(x):
        return None
    return x if full_shape[:new] + full_shape[new + 1 :] == dims(x) else None


def _is_copy(node: ir.Node) -> bool:
    """Return whether the node writes only copies of its first input."""
    return not is_op(node, "Concat") or all(value is node.inputs[0] for value in node.inputs)


def _is_group_gather(node: ir.Node, axis: int) -> bool:
    """Match case 2: return whether the indices are 0 0 1 1 2 2 ..."""
    index, heads = read_array(node.inputs[1]), dims(operand(node, 0))[axis : axis + 1]
    if attribute(node, "axis", 0) not in (axis, axis - 4) or index is None or index.ndim != 1 or not heads:
        return False
    if not isinstance(heads[0], int) or index.size % heads[0]:
        return False
    return np.array_equal(index, np.repeat(np.arange(heads[0]), index.size // heads[0]))
