"""Caches that grow with what an encoder gives become keys and values of that alone: all of a source comes at once.

Before: Concat(past, rows) along the length, the past being an input of the model, where the rows depend on no token of
the call. After: the rows, which a setup can compute once; the past and what became of it are gone.
"""

from __future__ import annotations

import onnx_ir as ir

from ..fusion.attention_node import NONPAD, is_attention
from ..fusion.matching import dims, operand
from ..fusion.sizes import InferSizesPass
from .cache_forms import K, counts_all_keys, grows, is_aligned
from .roles import Roles, find_roles


def drop_source_pasts(model: ir.Model) -> None:
    """Rewrite a model that `unify_caches` has been through; one whose tokens are not known stays as it is."""
    InferSizesPass()(model)
    grown = [node for node in model.graph if grows(node)]
    pasts = {operand(node, 0) for node in grown}
    roles = find_roles(model, Roles(""), [str(value.name) for value in pasts])
    inputs = {value.name: value for value in model.graph.inputs}
    called = {inputs[name] for name in (roles.ids, roles.mask, roles.positions, *roles.per_token) if name}
    if not called:
        return
    sources = {value for value in model.graph.inputs if value not in called | pasts and dims(value)}
    for node in grown:
        read = _inputs_of(operand(node, 1))
        if read & sources and not read & (called | pasts):
            _drop(model.graph, node)


def _drop(graph: ir.Graph, concat: ir.Node) -> None:
    past, rows, present = operand(concat, 0), operand(concat, 1), concat.outputs[0]
    attentions = [use.node for use in present.uses() if is_attention(use.node) and use.idx == K]
    graph.outputs.remove(present)
    present.replace_all_uses_with(rows)
    graph.remove(concat, safe=True)
    if not past.uses():
        graph.inputs.remove(past)
    for node in attentions:  # whose rows see all keys
        if counts_all_keys(node) and not is_aligned(node):
            node.replace_input_with(NONPAD, None)


def _inputs_of(value: ir.Value) -> set[ir.Value]:
    """Return the inputs of the model that a value is computed of."""
    pending, seen = [value], {value}
    while pending:
        node = pending.pop().producer()
        for read in () if node is None else node.inputs:
            if read is not None and read not in seen:
                seen.add(read)
                pending.append(read)
    return {value for value in seen if value.is_graph_input()}
