"""Caches of a fixed capacity that a model itself writes with TensorScatter, as exporters of static caches do."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..errors import ModelError
from ..fusion.matching import attribute, dims, is_op, operand
from .cache_forms import NONPAD


@dataclass(frozen=True)
class ScatteredCaches:
    """caches: output by input. starts is the input, int [B], of the slots that new rows go to; ends is that of
    nonpad_kv_seqlen, "" where attention has none."""

    capacity: int
    caches: dict[str, str]
    starts: str
    ends: str


def find_scattered_caches(model: ir.Model) -> ScatteredCaches | None:
    """Return the caches of a model whose sizes are inferred, None if it has none or writes them at several places."""
    updates = [node for node in model.graph if _updates(node)]
    starts = {_root(operand(node, 2)) for node in updates}
    ends = {
        _root(operand(node, NONPAD))
        for node in model.graph
        if is_op(node, "Attention") and len(node.inputs) > NONPAD and node.inputs[NONPAD] is not None
    }
    capacities = {dims(operand(node, 0))[attribute(node, "axis", -2)] for node in updates}
    if len(starts) != 1 or len(ends) > 1 or len(capacities) != 1:
        return None
    start, end, capacity = starts.pop(), ends.pop() if ends else None, capacities.pop()
    if start is None or (ends and end is None) or not isinstance(capacity, int):
        return None
    caches = {str(operand(node, 0).name): str(node.outputs[0].name) for node in updates}
    return ScatteredCaches(capacity, caches, str(start.name), "" if end is None else str(end.name))


def check_capacity(scattered: ScatteredCaches, capacity: int) -> None:
    """Raise ModelError where the model has caches of another capacity."""
    if scattered.capacity != capacity:
        raise ModelError(
            f"static_cache: the model writes caches of {scattered.capacity} slots itself, not of {capacity}. Compile with "
            f"static_cache={scattered.capacity}, or export it with other caches."
        )


def _updates(node: ir.Node) -> bool:
    """Whether the node writes rows of a cache that is an input and an output of the model."""
    if not is_op(node, "TensorScatter") or attribute(node, "mode", "linear") != "linear" or len(node.inputs) < 3:
        return False
    indices = node.inputs[2]
    return indices is not None and operand(node, 0).is_graph_input() and node.outputs[0].is_graph_output()


def _root(value: ir.Value) -> ir.Value | None:
    """Return the input [B] that the value is, but for its type."""
    while is_op(node := value.producer(), "Cast", "Identity"):
        assert node is not None
        value = operand(node, 0)
    return value if value.is_graph_input() and len(dims(value)) == 1 else None
