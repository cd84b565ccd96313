"""Conversion of com.microsoft Attention, whose cache has keys and values in one tensor, to MultiHeadAttention.

Before: Attention(x, weights, bias, mask_index, past [2, B, H, P, D]), whose present [2, B, H, P + S, D] is an output.
After: MatMul(x, weights) + bias, in thirds, and MultiHeadAttention over `past.key` and `past.value` [B, H, P, D], which
are inputs instead of past, as `present.key` and `present.value` are outputs instead of present.
"""

from __future__ import annotations

import onnx_ir as ir

from ..rewriting.matching import Rewrite, attribute, dims, is_static, operand, read_static_sizes
from .microsoft_caches import MICROSOFT_DOMAIN

_MASK, _PAST, _BIAS, _PAST_LENGTH = 3, 4, 5, 6
_ATTRIBUTES = ("num_heads", "scale", "mask_filter_value", "unidirectional")


def find_joint_caches(model: ir.Model) -> dict[str, str]:
    """Return by past input the present output of each cache that `split_joint_caches` splits."""
    nodes = [node for node in model.graph if _has_joint_cache(node)]
    return {str(operand(node, _PAST).name): str(node.outputs[1].name) for node in nodes}


def create_half_caches(cache: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return values for the keys and for the values of a cache [2, B, H, P, D]."""
    shape = None if cache.shape is None else ir.Shape(dims(cache)[1:])
    key, value = (ir.Value(name=f"{cache.name}.{half}", type=cache.type, shape=shape) for half in ("key", "value"))
    return key, value


def split_joint_caches(model: ir.Model) -> None:
    """Rewrite such attentions of a model whose sizes are inferred; others stay as they are."""
    for node in [node for node in model.graph if _has_joint_cache(node)]:
        widths = _read_widths(node)
        if widths is not None:
            _split_node(model.graph, node, widths)


def _has_joint_cache(node: ir.Node) -> bool:
    if (
        node.op_type != "Attention"
        or node.domain != MICROSOFT_DOMAIN
        or len(node.inputs) <= _PAST
        or len(node.outputs) < 2
    ):
        return False
    past, present = node.inputs[_PAST], node.outputs[1]
    if past is None or not past.is_graph_input() or not present.is_graph_output() or present.uses():
        return False
    shape = dims(past)
    return len(shape) == 5 and shape[0] == 2 and is_static(shape[2]) and is_static(shape[4]) and len(past.uses()) == 1


def _read_widths(node: ir.Node) -> tuple[int, ...] | None:
    """Return how many columns of the weights compute q, k and v; None for an attention without such caches."""
    x, weights = operand(node, 0), operand(node, 1)
    mask = node.inputs[_MASK]
    width = dims(weights)[-1] if dims(weights) else None
    has_lengths = len(node.inputs) > _PAST_LENGTH and node.inputs[_PAST_LENGTH] is not None
    if len(dims(x)) != 3 or not isinstance(width, int) or has_lengths or attribute(node, "do_rotary", 0):
        return None
    if mask is not None and (len(dims(mask)) != 2 or dims(mask)[1] == 1):
        return None
    widths = tuple(attribute(node, "qkv_hidden_sizes", ())) or (width // 3,) * 3
    cached = read_static_sizes((dims(operand(node, _PAST))[2], dims(operand(node, _PAST))[4]))
    fits = cached is not None and widths[1] == widths[2] == cached[0] * cached[1] and sum(widths) == width
    return widths if fits else None


def _split_node(graph: ir.Graph, node: ir.Node, widths: tuple[int, ...]) -> None:
    past, present = operand(node, _PAST), node.outputs[1]
    new, x = Rewrite(node), operand(node, 0)
    leading = dims(x)[:2]
    rows = new.emit("MatMul", [x, operand(node, 1)], shape=[*leading, sum(widths)])
    if (bias := node.inputs[2]) is not None:
        rows = new.emit("Add", [rows, bias], shape=[*leading, sum(widths)])
    bias_input = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    pasts, presents = create_half_caches(past), create_half_caches(present)
    attributes = {name: given.value for name, given in node.attributes.items() if name in _ATTRIBUTES}
    y, *half_outputs = new.emit_node(
        "MultiHeadAttention",
        [*new.emit_slices(rows, widths), None, node.inputs[_MASK], bias_input, *pasts],
        attributes,
        [node.outputs[0], *presents],
        domain=MICROSOFT_DOMAIN,
        name=node.name,
    )
    for output, half in zip(half_outputs, presents):
        output.name = half.name
    index = list(graph.outputs).index(present)
    graph.outputs[index : index + 1] = half_outputs
    new.replace([node], node.outputs[0], y)
    index = list(graph.inputs).index(past)
    graph.inputs[index : index + 1] = pasts
