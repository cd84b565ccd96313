"""Removal of caches that grow by an encoder's output: all rows of a source arrive at once.

Before: a past that is an input of the model, and rows after it, joined by Concat along the length or by Attention,
where the rows depend on no token of the call. After: the rows, which a setup can compute once; the past and its present
output are removed.
"""

from __future__ import annotations

import onnx_ir as ir

from ..rewriting.attention_node import PAST_KEY, PAST_VALUE, attention_input, is_attention
from ..rewriting.matching import dims, operand
from ..rewriting.sizes import InferSizesPass
from .cache_forms import K, V, is_growing_cache
from .roles import InputRoles, find_roles

_PRESENT_BY_PAST = {PAST_KEY: 1, PAST_VALUE: 2}


def drop_source_pasts(model: ir.Model) -> None:
    """Rewrite a fused model; a model whose tokens are unknown stays as it is."""
    InferSizesPass()(model)
    cache_names = [str(value.name) for value in model.graph.inputs if len(dims(value)) == 4]
    roles = find_roles(model, InputRoles(""), cache_names)
    called = {name for name in (roles.ids, roles.mask, roles.positions, *roles.per_token, *cache_names) if name}
    if not roles.ids:
        return
    for node in list(model.graph):
        if is_growing_cache(node) and _is_of_source(operand(node, 1), called):
            _drop_concat(model.graph, node)
        elif is_attention(node) and all(_is_of_source(operand(node, position), called) for position in (K, V)):
            _drop_past(model.graph, node)


def _is_of_source(rows: ir.Value, called: set[str]) -> bool:
    """Return whether rows are computed from inputs that are the same in every call."""
    pending, seen = [rows], {rows}
    while pending:
        node = pending.pop().producer()
        for value in () if node is None else node.inputs:
            if value is not None and value not in seen:
                seen.add(value)
                pending.append(value)
    inputs = [value for value in seen if value.is_graph_input() and dims(value)]
    return bool(inputs) and not any(value.name in called for value in inputs)


def _drop_concat(graph: ir.Graph, concat: ir.Node) -> None:
    past, present = operand(concat, 0), concat.outputs[0]
    graph.outputs.remove(present)
    present.replace_all_uses_with(operand(concat, 1))
    graph.remove(concat, safe=True)
    _drop_input(graph, past)


def _drop_past(graph: ir.Graph, attention: ir.Node) -> None:
    for position, output in _PRESENT_BY_PAST.items():
        past = attention_input(attention, position)
        present = attention.outputs[output] if output < len(attention.outputs) else None
        if past is None or not past.is_graph_input() or (present is not None and present.uses()):
            continue
        attention.replace_input_with(position, None)
        if present is not None and present in graph.outputs:
            graph.outputs.remove(present)
            present.name = ""
        _drop_input(graph, past)


def _drop_input(graph: ir.Graph, value: ir.Value) -> None:
    if not value.uses():
        graph.inputs.remove(value)
