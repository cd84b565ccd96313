"""Fusion of a decomposed causal convolution with a carried state into CausalConvWithState of com.microsoft."""

from __future__ import annotations

import onnx_ir as ir

from ..graph.rewriting.matching import (
    Rewrite,
    attribute,
    dims,
    is_op,
    operand,
    producer,
    read_array,
    read_integers,
    replace_value,
)
from .node_pass import MICROSOFT_DOMAIN, NodePass

_LENGTH = 2  # axis of [batch, channels, length]
_TO_THE_END = 2**31 - 1
_MOVES = ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")


class FuseStatefulConvPass(NodePass):
    """Fusion of a depthwise Conv over Concat(state, x) and a Slice of its last positions.

    The result is one CausalConvWithState. The state has as many positions as the kernel reaches back, and so has the
    Slice, an output of the model.

    1. The Slice begins at a negative constant.
    2. It begins at the length of the Concat less a constant, and ends at that length or beyond.

    The match is rejected for strides, padding, and readers of the Concat other than these two and Shape.
    """

    since = 11
    operators = ("Conv",)
    domain = MICROSOFT_DOMAIN

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(conv: ir.Node) -> bool:
    concat, weight = producer(operand(conv, 0), "Concat"), dims(operand(conv, 1))
    if concat is None or len(concat.inputs) != 2 or attribute(concat, "axis", 0) not in (_LENGTH, -1):
        return False
    state, x, concatenated = operand(concat, 0), operand(concat, 1), concat.outputs[0]
    dilation = _read_dilation(conv)
    if dilation is None or len(weight) != 3 or not isinstance(weight[2], int):
        return False
    reach = (weight[2] - 1) * dilation
    slices = [use.node for use in concatenated.uses() if is_op(use.node, "Slice")]
    other_readers = [
        use.node for use in concatenated.uses() if use.node is not conv and not is_op(use.node, "Slice", "Shape")
    ]
    if len(slices) != 1 or other_readers or concatenated.is_graph_output() or reach < 1 or dims(state)[-1:] != (reach,):
        return False
    present = slices[0].outputs[0]
    if present.uses() or not present.is_graph_output() or not _is_last_slice(slices[0], concatenated, reach):
        return False
    new, y = Rewrite(conv), conv.outputs[0]
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    inputs, attributes = [x, operand(conv, 1), bias, state], {"dilation": dilation} if dilation > 1 else {}
    fused = new.emit_node("CausalConvWithState", inputs, attributes, [y, present], domain=MICROSOFT_DOMAIN)
    replace_value(present, fused[1])
    new.replace([conv, slices[0], concat], y, fused[0])
    return True


def _read_dilation(conv: ir.Node) -> int | None:
    """Return the dilation of a depthwise Conv along one axis; None for any other Conv.

    Such a Conv has no strides and no padding.
    """
    weight = dims(operand(conv, 1))
    is_plain = set(attribute(conv, "strides", [1])) == {1} and set(attribute(conv, "pads", [0])) == {0}
    is_by_channel = weight[1:2] == (1,) and attribute(conv, "group", 1) == weight[0]
    dilations = list(attribute(conv, "dilations", [1]))
    if not (is_plain and is_by_channel and len(dilations) == 1) or attribute(conv, "auto_pad", "NOTSET") != "NOTSET":
        return None
    return int(dilations[0])


def _is_last_slice(node: ir.Node, concatenated: ir.Value, count: int) -> bool:
    """Return whether a Slice returns the last `count` positions."""
    axes = read_integers(node, 3, "axes")
    if axes not in ([_LENGTH], [-1]) or (len(node.inputs) > 4 and read_integers(node, 4, "steps") != [1]):
        return False
    start, end = (_read_bound(node.inputs[k], concatenated) for k in (1, 2))
    if start not in ((False, -count), (True, -count)) or end is None:
        return False
    return end == (True, 0) or (not end[0] and end[1] >= _TO_THE_END)


def _read_bound(value: ir.Value | None, concatenated: ir.Value) -> tuple[bool, int] | None:
    """Return a bound: whether it counts from the length of the Concat, and the constant added to it."""
    elements = read_array(value)
    if elements is not None:
        return (False, int(elements.reshape(-1)[0])) if elements.size == 1 else None
    node = value.producer() if value is not None else None
    if node is None:
        return None
    if is_op(node, *_MOVES):
        return _read_bound(operand(node, 0), concatenated)
    if is_op(node, "Sub", "Add"):
        first, second = (_read_bound(operand(node, k), concatenated) for k in (0, 1))
        if first is None or second is None or second[0]:
            return None
        return first[0], first[1] + (second[1] if is_op(node, "Add") else -second[1])
    return (True, 0) if _is_length(node, concatenated) else None


def _is_length(node: ir.Node, concatenated: ir.Value) -> bool:
    """Return whether a node computes the length of the Concat."""
    if is_op(node, "Gather"):
        shape, index = producer(operand(node, 0), "Shape"), read_array(operand(node, 1))
        if shape is None or index is None or index.size != 1 or attribute(shape, "start", 0):
            return False
        return operand(shape, 0) is concatenated and int(index.reshape(-1)[0]) in (_LENGTH, -1)
    if not is_op(node, "Shape") or operand(node, 0) is not concatenated:
        return False
    return attribute(node, "start", 0) in (_LENGTH, -1) and attribute(node, "end", _LENGTH + 1) == _LENGTH + 1
