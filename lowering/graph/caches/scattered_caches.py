"""Caches of a fixed capacity that a model itself writes with TensorScatter, as exporters of static caches do."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ...errors import ModelError
from ..rewriting.attention_node import NONPAD, PAST_KEY, attention_input, is_attention
from ..rewriting.matching import Size, attribute, dims, is_op, operand, read_static_sizes
from ..rewriting.sizes import InferSizesPass


@dataclass(frozen=True)
class ScatteredCaches:
    """The caches of a model; caches: output by input.

    starts is the input, int [B], with the slots of new rows; ends is that of nonpad_kv_seqlen, "" if attention has
    none.
    """

    capacity: int
    caches: dict[str, str]
    starts: str
    ends: str


def find_scattered_caches(model: ir.Model) -> ScatteredCaches | None:
    """Return the caches of a model whose sizes are inferred.

    None if it has none, or writes them at different slots.
    """
    updates = [node for node in model.graph if _is_cache_update(node)]
    starts = {_find_length_input(operand(node, 2)) for node in updates}
    ends = {
        _find_length_input(operand(node, NONPAD))
        for node in model.graph
        if is_attention(node) and attention_input(node, NONPAD) is not None
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
    """Raise ModelError if the model has caches of another capacity."""
    if scattered.capacity != capacity:
        raise ModelError(
            "static_cache.capacity_mismatch",
            f"static_cache: the model writes caches of {scattered.capacity} slots itself, not of {capacity}. Compile "
            f"with static_cache={scattered.capacity}, or export it with other caches.",
        )


def grow_scattered_caches(model: ir.Model) -> None:
    """Convert caches that a model writes itself to past inputs that grow.

    All of them must be read by Attention as they are.

    Before: TensorScatter(cache, rows, starts), read by an Attention up to nonpad_kv_seqlen. After: an Attention of the
    new rows after past_key and past_value [B, Hkv, P, D], under the names of the caches.
    """
    InferSizesPass()(model)
    scattered = find_scattered_caches(model)
    if scattered is None or not scattered.ends:
        return
    readers = [node for node in model.graph if is_attention(node) and _is_read_of_updates(node)]
    if 2 * len(readers) != len(scattered.caches):
        return
    for node in readers:
        _grow(model.graph, node)
    for value in [v for v in model.graph.inputs if v.name in (scattered.starts, scattered.ends) and not v.uses()]:
        model.graph.inputs.remove(value)


def _is_read_of_updates(node: ir.Node) -> bool:
    """Return whether keys and values of an Attention are caches that no other node reads.

    Their heads and sizes must be static.
    """
    if attention_input(node, NONPAD) is None or any(node.inputs[PAST_KEY:NONPAD]):
        return False
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return False
    for value in node.inputs[1:3]:
        update = value.producer() if value is not None else None
        if value is None or update is None or not _is_cache_update(update) or len(value.uses()) != 1:
            return False
        if read_static_sizes(_read_heads_and_size(node, value)) is None or len(operand(update, 0).uses()) != 1:
            return False
    return True


def _read_heads_and_size(node: ir.Node, cache: ir.Value) -> tuple[Size, Size]:
    """Return the heads and the size of a cache [B, Hkv, slots, D] or [B, slots, Hkv * D]."""
    sizes, heads = dims(cache), attribute(node, "kv_num_heads", 0)
    if len(sizes) == 4:
        return sizes[1], sizes[3]
    return heads, sizes[2] // heads if heads and isinstance(sizes[2], int) else ir.SymbolicDim(None)


def _grow(graph: ir.Graph, node: ir.Node) -> None:
    updates = [operand(node, k).producer() for k in (1, 2)]
    node.replace_input_with(NONPAD, None)
    node.resize_outputs(3)
    for k, update in enumerate(updates, 1):
        assert update is not None
        past, present, grown = operand(update, 0), update.outputs[0], node.outputs[k]
        heads, size = _read_heads_and_size(node, present)
        batch = dims(past)[0]
        past.shape = ir.Shape([batch, heads, ir.SymbolicDim("past_slots"), size])
        grown.type, grown.shape = present.type, ir.Shape([batch, heads, ir.SymbolicDim(None), size])
        node.replace_input_with(k, update.inputs[1])
        node.replace_input_with(3 + k, past)
        graph.outputs[list(graph.outputs).index(present)] = grown
        grown.name, present.name = present.name, None
        graph.remove(update, safe=True)


def _is_cache_update(node: ir.Node) -> bool:
    """Return whether the node writes rows of a cache that is an input and an output of the model."""
    if not is_op(node, "TensorScatter") or attribute(node, "mode", "linear") != "linear" or len(node.inputs) < 3:
        return False
    indices = node.inputs[2]
    return indices is not None and operand(node, 0).is_graph_input() and node.outputs[0].is_graph_output()


def _find_length_input(value: ir.Value) -> ir.Value | None:
    """Return the input [B] that the value equals, apart from its type."""
    while is_op(node := value.producer(), "Cast", "Identity"):
        assert node is not None
        value = operand(node, 0)
    return value if value.is_graph_input() and len(dims(value)) == 1 else None
