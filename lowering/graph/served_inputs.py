"""The inputs of a decoder that is to be served, by what they are for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ..errors import InputError, ModelError
from ..fusion.matching import dims
from ..fusion.sizes import InferSizesPass
from .roles import Roles, find_roles, table_rows
from .serve import Serve


@dataclass(frozen=True)
class ServedInputs:
    """What a decoder reads: token ids or embeddings, its mask, positions, and what else each token has."""

    ids: ir.Value
    mask: ir.Value | None
    positions: ir.Value | None
    per_token: list[ir.Value]

    def vocabularies(self) -> dict[str, int]:
        """The rows of the table that each input of ids picks rows of, as far as they are known."""
        rows = {str(value.name): table_rows(value) for value in (self.ids, *self.per_token)}
        return {name: count for name, count in rows.items() if isinstance(count, int)}


def find_inputs(model: ir.Model, serve: Serve) -> ServedInputs:
    """Return the inputs of a model whose sizes are inferred. Raises InputError where none holds tokens."""
    inputs = {value.name: value for value in model.graph.inputs}
    caches = [str(name) for name, value in inputs.items() if len(dims(value)) > 3]
    roles = find_roles(model, Roles(serve.ids, serve.mask, serve.positions), caches)
    ids = inputs.get(roles.ids)
    if ids is None or len(dims(ids)) not in (2, 3):
        names = ", ".join(str(name) for name in inputs)
        raise InputError(
            "serve: no input [batch, tokens] is known to hold token ids, and none [batch, tokens, width] embeddings. "
            f"Name it as `ids`: {names}."
        )
    per_token = [inputs[name] for name in roles.per_token]
    return ServedInputs(ids, inputs.get(roles.mask), inputs.get(roles.positions), per_token)


def batch_of(model: ir.Model, serve: Serve) -> str | None:
    """The name of the batch dimension, None if it is 1. Raises InputError where there are no such tokens, ModelError
    for a decoder of another form."""
    sized = model.clone()
    InferSizesPass()(sized)
    ids = find_inputs(sized, serve).ids
    batch, tokens = dims(ids)[:2]
    if isinstance(tokens, int) or (isinstance(batch, int) and batch != 1):
        raise ModelError(
            f"serve: '{ids.name}' is {[str(batch), str(tokens)]}: export the model with any number of tokens, and "
            "with any number of sequences or with one."
        )
    return None if isinstance(batch, int) else batch.value


def nodes_of(graph: ir.Graph, names: Collection[str]) -> list[ir.Node]:
    """Return the nodes whose results depend on some of these inputs, and on no others."""
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    own = {value for value in inputs if value.name in names}
    others, nodes = set(inputs) - own, list[ir.Node]()
    for node in graph:
        has_bodies = any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())
        if has_bodies or not others.isdisjoint(node.inputs):
            others.update(node.outputs)
        elif not own.isdisjoint(node.inputs):
            own.update(node.outputs)
            nodes.append(node)
    return nodes


def check_known(others: list[ir.Value], setup: ir.Model | None) -> None:
    """Raise ModelError for an input that is neither what a decoder keeps nor keys and values of a source."""
    for value in others:
        if setup is not None and any(value.name == output.name for output in setup.graph.outputs):
            node, names = next(iter(value.uses())).node, ", ".join(f"'{source.name}'" for source in setup.graph.inputs)
            raise ModelError(
                f"serve: node '{node.name}' ({node.op_type}) reads what is computed of {names} alone, and is not "
                "attention over keys and values [batch, heads, rows, size] of a source, all of which it sees."
            )
        raise ModelError(
            f"serve: the model has an input '{value.name}' beside tokens, mask, positions, growing caches, what "
            "attention over an encoder's output has keys and values of, and states that LinearAttention or "
            "CausalConvWithState carries on. Export recurrences over any number of tokens, as these operators."
        )
