"""Keys and values repeated for the query heads of their group: the Attention node reads them as they were."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .attention_node import PAST_KEY, PAST_VALUE, is_attention
from .matching import Rewrite, Size, array, attribute, dims, is_op, operand, producer
from .node_pass import NodePass
from .opset import FIRST


class GroupHeadsPass(NodePass):
    """Takes back the repetition of K and V [B, Hkv, T, D] to [B, Hq, T, D] in front of Attention.

    Query head h reads key head h // G, so only h0 h0 h1 h1 ... is taken back. The heads are on axis 1, or on axis 2 in
    front of a Transpose [0, 2, 1, 3].

    1. Unsqueeze behind the heads, Expand or Tile by G, Reshape.
    2. Gather along the heads with known indices.
    3. One head for all: Expand, Tile or Concat of it with itself, in whatever order.

    The other order (h0 h1 h0 h1: the new axis before the heads, or Tile of more than one head), K and V repeated
    differently, a present or past key, head counts as attributes, and inputs of three dimensions refuse the match.
    """

    since = FIRST

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
    by_k, by_v = _unrepeated(k), _unrepeated(v)
    if by_k is None or by_v is None or by_k.heads != by_v.heads or dims(k)[1] != dims(v)[1]:
        return False
    for position, repeated, found in ((1, k, by_k), (2, v, by_v)):
        x = found.value
        if found.axis == 2:
            new = Rewrite(_made_by(repeated))
            x = new.transpose(x, [0, 2, 1, 3])
            new.insert()
        _read_length_of(x, repeated)
        node.replace_input_with(position, x)
    return True


def _made_by(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _read_length_of(x: ir.Value, repeated: ir.Value) -> None:
    """Who asks for the length of the repeated keys asks the others, so that they need not be computed."""
    for use in repeated.uses():
        if is_op(use.node, "Shape") and attribute(use.node, "start", 0) >= 2 and dims(x)[2:] == dims(repeated)[2:]:
            use.node.replace_input_with(0, x)


@dataclass(frozen=True)
class _Heads:
    """Keys or values before they were repeated along an axis."""

    value: ir.Value
    axis: int

    @property
    def heads(self) -> Size:
        return dims(self.value)[self.axis]


def _unrepeated(value: ir.Value) -> _Heads | None:
    transpose = producer(value, "Transpose")
    if transpose is not None and list(attribute(transpose, "perm", ())) == [0, 2, 1, 3]:
        value, axis = operand(transpose, 0), 2
    else:
        axis = 1
    node = producer(value, "Reshape", "Gather", "Expand", "Tile", "Concat")
    if node is None:
        return None
    if is_op(node, "Reshape"):
        x = _before_expansion(operand(node, 0), axis)
    elif is_op(node, "Gather"):
        x = operand(node, 0) if _gathers_groups(node, axis) else None
    else:
        x = operand(node, 0) if dims(operand(node, 0))[axis : axis + 1] == (1,) and _copies(node) else None
    if x is None or len(dims(x)) != 4:
        return None
    rest = [shape[:axis] + shape[axis + 1 :] for shape in (dims(x), dims(value))]
    heads, all_heads = dims(x)[axis], dims(value)[axis]
    if rest[0] != rest[1] or not isinstance(heads, int) or not isinstance(all_heads, int) or all_heads % heads:
        return None
    return _Heads(x, axis)


def _before_expansion(wide: ir.Value, axis: int) -> ir.Value | None:
    """Case 1: X where wide is X [.., Hkv, ..] with G copies on a new axis behind the heads."""
    repeat = producer(wide, "Expand", "Tile", "Concat")
    thin = operand(repeat, 0) if repeat is not None and _copies(repeat) else None
    unsqueeze = producer(thin, "Unsqueeze", "Reshape")
    if thin is None or unsqueeze is None:
        return None
    x, new = operand(unsqueeze, 0), axis + 1
    narrow, full = dims(thin), dims(wide)
    if len(narrow) != 5 or narrow[new] != 1 or narrow[:new] + narrow[new + 1 :] != dims(x):
        return None
    return x if full[:new] + full[new + 1 :] == dims(x) else None


def _copies(node: ir.Node) -> bool:
    """Whether the node writes nothing but copies of its first input."""
    return not is_op(node, "Concat") or all(value is node.inputs[0] for value in node.inputs)


def _gathers_groups(node: ir.Node, axis: int) -> bool:
    """Case 2: the indices are 0 0 1 1 2 2 ..."""
    index, heads = array(node.inputs[1]), dims(operand(node, 0))[axis : axis + 1]
    if attribute(node, "axis", 0) not in (axis, axis - 4) or index is None or index.ndim != 1 or not heads:
        return False
    if not isinstance(heads[0], int) or index.size % heads[0]:
        return False
    return np.array_equal(index, np.repeat(np.arange(heads[0]), index.size // heads[0]))
