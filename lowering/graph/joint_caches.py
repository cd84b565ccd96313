"""com.microsoft Attention, whose cache holds keys and values in one tensor, becomes MultiHeadAttention with two caches.

Before: Attention(x, weights, bias, mask_index, past [2, B, H, P, D]), whose present [2, B, H, P + S, D] is an output.
After: MatMul(x, weights) + bias, in thirds, and MultiHeadAttention over `past.key` and `past.value` [B, H, P, D], which
are inputs in the place of past, as `present.key` and `present.value` are outputs in that of present.
"""

from __future__ import annotations

from itertools import pairwise

import onnx_ir as ir

from ..fusion.matching import Rewrite, attribute, dims, known, numbers, operand
from .microsoft_caches import DOMAIN

_MASK, _PAST, _BIAS, _PAST_LENGTH = 3, 4, 5, 6
_ATTRIBUTES = ("num_heads", "scale", "mask_filter_value", "unidirectional")


def joint_caches(model: ir.Model) -> dict[str, str]:
    """Return by past input the present output of each cache that `split_joint_caches` splits."""
    nodes = [node for node in model.graph if _holds_joint_cache(node)]
    return {str(operand(node, _PAST).name): str(node.outputs[1].name) for node in nodes}


def halves(cache: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return values for the keys and for the values of a cache [2, B, H, P, D]."""
    shape = None if cache.shape is None else ir.Shape(dims(cache)[1:])
    key, value = (ir.Value(name=f"{cache.name}.{half}", type=cache.type, shape=shape) for half in ("key", "value"))
    return key, value


def split_joint_caches(model: ir.Model) -> None:
    """Rewrite such attentions of a model whose sizes are inferred; others stay as they are."""
    for node in [node for node in model.graph if _holds_joint_cache(node)]:
        widths = _widths(node)
        if widths is not None:
            _split(model.graph, node, widths)


def _holds_joint_cache(node: ir.Node) -> bool:
    if node.op_type != "Attention" or node.domain != DOMAIN or len(node.inputs) <= _PAST or len(node.outputs) < 2:
        return False
    past, present = node.inputs[_PAST], node.outputs[1]
    if past is None or not past.is_graph_input() or not present.is_graph_output() or present.uses():
        return False
    shape = dims(past)
    return len(shape) == 5 and shape[0] == 2 and known(shape[2]) and known(shape[4]) and len(past.uses()) == 1


def _widths(node: ir.Node) -> tuple[int, ...] | None:
    """Return how many columns of the weights give q, k and v; None for an attention that has no such caches."""
    x, weights = operand(node, 0), operand(node, 1)
    mask = node.inputs[_MASK]
    width = dims(weights)[-1] if dims(weights) else None
    has_lengths = len(node.inputs) > _PAST_LENGTH and node.inputs[_PAST_LENGTH] is not None
    if len(dims(x)) != 3 or not isinstance(width, int) or has_lengths or attribute(node, "do_rotary", 0):
        return None
    if mask is not None and (len(dims(mask)) != 2 or dims(mask)[1] == 1):
        return None
    given = tuple(attribute(node, "qkv_hidden_sizes", ())) or (width // 3,) * 3
    cached = numbers((dims(operand(node, _PAST))[2], dims(operand(node, _PAST))[4]))
    fits = cached is not None and given[1] == given[2] == cached[0] * cached[1] and sum(given) == width
    return given if fits else None


def _split(graph: ir.Graph, node: ir.Node, widths: tuple[int, ...]) -> None:
    past, present = operand(node, _PAST), node.outputs[1]
    new, x = Rewrite(node), operand(node, 0)
    front = dims(x)[:2]
    rows = new.emit("MatMul", [x, operand(node, 1)], shape=[*front, sum(widths)])
    if (bias := node.inputs[2]) is not None:
        rows = new.emit("Add", [rows, bias], shape=[*front, sum(widths)])
    ends = [sum(widths[:k]) for k in range(4)]
    parts = [
        new.emit("Slice", [rows, *(new.integers(bound) for bound in (start, end, -1))], shape=[*front, end - start])
        for start, end in pairwise(ends)
    ]
    added = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    pasts, presents = halves(past), halves(present)
    attributes = {name: given.value for name, given in node.attributes.items() if name in _ATTRIBUTES}
    attention = ir.node(
        "MultiHeadAttention", [*parts, None, node.inputs[_MASK], added, *pasts], attributes, domain=DOMAIN,
        num_outputs=3, name=node.name,
    )  # fmt: skip
    new.nodes.append(attention)
    new.insert()
    y, *made = attention.outputs
    y.type, y.shape = node.outputs[0].type, node.outputs[0].shape
    for output, half in zip(made, presents):
        output.name, output.type, output.shape = half.name, half.type, half.shape
    node.outputs[0].replace_all_uses_with(y, replace_graph_outputs=True)
    y.name, node.outputs[0].name = node.outputs[0].name, None
    place = list(graph.outputs).index(present)
    graph.outputs[place : place + 1] = made
    graph.remove(node, safe=True)
    place = list(graph.inputs).index(past)
    graph.inputs[place : place + 1] = pasts
