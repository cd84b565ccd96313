"""The inputs of a decoder to be served, by role."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from ...errors import InputError, ModelError
from ..caches.roles import InputRoles, find_roles, read_table_rows
from ..loading.legality import has_bodies
from ..rewriting.matching import dims
from ..rewriting.sizes import InferSizesPass
from .serve import Serve


@dataclass(frozen=True)
class ServedInputs:
    """Inputs of a decoder: token ids or embeddings, its mask, positions, and further inputs per token."""

    ids: ir.Value
    mask: ir.Value | None
    positions: ir.Value | None
    per_token: list[ir.Value]

    def vocabularies(self) -> dict[str, int]:
        """Return the number of rows of the table that each input of ids indexes, if static."""
        rows = {str(value.name): read_table_rows(value) for value in (self.ids, *self.per_token)}
        return {name: count for name, count in rows.items() if isinstance(count, int)}


def find_inputs(model: ir.Model, serve: Serve) -> ServedInputs:
    """Return the inputs of a model whose sizes are inferred.

    Raises:
        InputError: No input contains tokens.
    """
    inputs = {value.name: value for value in model.graph.inputs}
    caches = [str(name) for name, value in inputs.items() if len(dims(value)) > 3]
    roles = find_roles(model, InputRoles(serve.ids, serve.mask, serve.positions), caches)
    ids = inputs.get(roles.ids)
    if ids is None or len(dims(ids)) not in (2, 3):
        names = ", ".join(str(name) for name in inputs)
        raise InputError(
            "serve.ids_missing",
            "serve: no input [batch, tokens] was recognized as token ids, and no input [batch, tokens, width] as "
            f"embeddings. Name one of the inputs as `ids`: {names}.",
        )
    per_token = [inputs[name] for name in roles.per_token]
    return ServedInputs(ids, inputs.get(roles.mask), inputs.get(roles.positions), per_token)


def find_batch_dimension(model: ir.Model, serve: Serve) -> str | None:
    """Return the name of the batch dimension, None if it is 1.

    Raises:
        InputError: There are no such tokens.
        ModelError: The decoder has another form.
    """
    sized = model.clone()
    InferSizesPass()(sized)
    ids = find_inputs(sized, serve).ids
    batch, tokens = dims(ids)[:2]
    if isinstance(tokens, int) or (isinstance(batch, int) and batch != 1):
        raise ModelError(
            "serve.size_static",
            f"serve: '{ids.name}' is {[str(batch), str(tokens)]}. Export the model with a symbolic number of tokens, "
            "and with a symbolic number of sequences or with one.",
        )
    return None if isinstance(batch, int) else batch.value


def find_dependent_nodes(graph: ir.Graph, names: Collection[str]) -> list[ir.Node]:
    """Return the nodes whose results depend on some of these inputs, and on no others."""
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    dependent = {value for value in inputs if value.name in names}
    independent, nodes = set(inputs) - dependent, list[ir.Node]()
    for node in graph:
        if has_bodies(node) or not independent.isdisjoint(node.inputs):
            independent.update(node.outputs)
        elif not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
            nodes.append(node)
    return nodes


def reject_inputs(inputs: list[ir.Value], setup: ir.Model | None) -> None:
    """Raise ModelError for an input that is neither state of a decoder nor keys and values of a source."""
    for value in inputs:
        if setup is not None and any(value.name == output.name for output in setup.graph.outputs):
            node, names = next(iter(value.uses())).node, ", ".join(f"'{source.name}'" for source in setup.graph.inputs)
            raise ModelError(
                "serve.source_use_unsupported",
                f"serve: node '{node.name}' ({node.op_type}) reads values computed from {names} only, but is not "
                "attention to all keys and values [batch, heads, rows, size] of a source.",
            )
        raise ModelError(
            "serve.input_unsupported",
            f"serve: the model has an input '{value.name}' other than tokens, mask, positions, growing caches, "
            "sources of keys and values for attention over an encoder's output, and states that LinearAttention or "
            "CausalConvWithState updates. Export recurrences over any number of tokens, as these operators.",
        )
