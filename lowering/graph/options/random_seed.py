"""The input that sets the seed of random nodes at each call."""

from __future__ import annotations

import onnx_ir as ir

from ...errors import InputError
from ..loading.legality import iterate_graphs
from ..rewriting.matching import can_drop

RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")


def add_seed_input(model: ir.Model, name: str) -> None:
    """Give the model an input `name`, an int64 scalar, in place; the importer makes random nodes read it.

    Raises:
        InputError: The name is empty or taken, or no node would read the input.
    """
    taken = {value.name for graph in iterate_graphs(model) for value in (*graph.inputs, *graph.initializers.values())}
    taken.update(value.name for graph in iterate_graphs(model) for node in graph for value in node.outputs)
    if not name or name in taken:
        raise InputError(
            "option.seed_name_invalid",
            f"seed={name!r}: the model cannot have a new input of this name. Choose another name.",
        )
    if not any(
        can_draw_random(node) and "seed" not in node.attributes for graph in iterate_graphs(model) for node in graph
    ):
        raise InputError(
            "option.seed_unused",
            f"seed={name!r}: no node would read this input, as the model has no random node without an attribute "
            "seed. Leave the option out.",
        )
    shape, kind = ir.Shape([]), ir.TensorType(ir.DataType.INT64)
    model.graph.inputs.append(ir.Value(name=name, shape=shape, type=kind))


def can_draw_random(node: ir.Node) -> bool:
    """Return whether a node may draw random numbers."""
    if node.domain not in ("", "ai.onnx"):
        return False
    return node.op_type in RANDOM or (node.op_type == "Dropout" and can_drop(node))
