"""Conversion of growing caches to slot caches, written in place instead of concatenating past and new keys.

An exported decoder takes past keys [B, Hkv, P, D] and returns present ones [B, Hkv, P + S, D], a copy of the past with
S more rows. After the rewrite, it takes a cache [B, Hkv, capacity, D] and the number P as an input of its own.
TensorScatter writes the new rows, in place as the cache is donated, and Attention reads the first P + S slots
(nonpad_kv_seqlen). All other readers of the length of the past read P.

Caches of layers with a sliding window are rings of fewer slots (windowed_caches.py), in which TensorScatter wraps
around.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes import common

from ...errors import ModelError
from ..rewriting.attention_node import NONPAD, is_attention
from ..rewriting.matching import Rewrite, Size, attribute, dims, is_op, operand
from ..rewriting.opset import opset
from ..rewriting.sizes import InferSizesPass
from .cache_forms import LENGTH_AXIS, OPSET, K, can_read_slots, is_growing_cache, use_opset_24
from .roles import InputRoles
from .windowed_caches import find_windows, mask_by_slot, ring_slots

PAST_LENGTH = "past_length"
"""The new input: int64 [], the number of rows in the caches before the call."""


@dataclass(frozen=True)
class StaticCaches:
    """The slot caches of a model.

    * caches: output by input.
    * tokens: an input and its axis whose size is the number of new rows, if there is one.
    * rings: the numbers of slots of inputs that contain only the newest tokens.
    * rows: how many new rows a call may add, None if only the capacity limits it.
    """

    caches: dict[str, str]
    tokens: tuple[str, int] | None
    rings: dict[str, int]
    rows: int | None


def use_static_caches(model: ir.Model, capacity: int, roles: InputRoles) -> StaticCaches:
    """Rewrite a model that `fuse` has processed; windows are proven by the inputs in roles.

    Raises:
        ModelError: The model has no growing caches, or is below opset 23.
    """
    InferSizesPass()(model)
    grown = [node for node in model.graph if is_growing_cache(node)]
    if not grown:
        raise ModelError(
            "static_cache.cache_missing",
            "static_cache: no output of the model is a past input [batch, heads, length, size] extended by new rows "
            "(by Concat or an attention operator), and no input is a state. Export the model with past_key_values "
            "as inputs and outputs.",
        )
    if opset(model) < OPSET - 1:
        raise ModelError(
            "static_cache.opset_unsupported",
            f"static_cache: the model has opset {opset(model)}, which cannot be converted to {OPSET}.",
        )
    tokens = _find_input_axis(model.graph, dims(operand(grown[0], 1))[LENGTH_AXIS])
    use_opset_24(model)
    slotted = [node for node in model.graph if is_attention(node) and can_read_slots(node, grown)]
    windows = find_windows(model, roles, slotted, grown, capacity) if tokens is not None else {}
    length = ir.Value(name=PAST_LENGTH, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    model.graph.inputs.append(length)
    slots = {concat: ring_slots(left) for concat, left in windows.items()}
    rings = {str(operand(concat, 0).name): count for concat, count in slots.items()}
    rows = min((slots[concat] - left for concat, left in windows.items()), default=None)
    for node in slotted:
        keys = operand(node, K).producer()
        if keys is not None and keys in slots:
            _read_ring(node, length, operand(keys, 1), slots[keys])
    caches = dict(_rewrite_cache(concat, length, capacity, slots.get(concat), slotted) for concat in grown)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    return StaticCaches(caches, tokens, rings, rows)


def _read_ring(node: ir.Node, length: ir.Value, rows: ir.Value, slots: int) -> None:
    new = Rewrite(node)
    before, total = _emit_past_length(new, length), _emit_total_length(new, length, rows)
    new.insert()
    mask_by_slot(node, before, total, slots)


def _find_input_axis(graph: ir.Graph, size: Size) -> tuple[str, int] | None:
    for value in graph.inputs:
        for axis, other in enumerate(dims(value)):
            if isinstance(size, ir.SymbolicDim) and size == other and value.name is not None:
                return value.name, axis
    return None


def _rewrite_cache(
    concat: ir.Node, length: ir.Value, capacity: int, ring: int | None, slotted: Collection[ir.Node]
) -> tuple[str, str]:
    """Rewrite one cache to slots, or to a ring of so many; return the names of its input and output."""
    past, rows, present = operand(concat, 0), operand(concat, 1), concat.outputs[0]
    batch, heads, _, size = dims(past)
    past.shape = ir.Shape([batch, heads, capacity if ring is None else ring, size])
    for node, position in [use for use in past.uses() if use.node is not concat]:
        _restore_reader(node, position, past, lambda new: _emit_past_length(new, length))

    new = Rewrite(concat)
    batches = new.emit_size(rows, 0)
    slots = new.emit("Expand", [_emit_past_length(new, length), batches], shape=[batch])
    mode = {} if ring is None else {"mode": "circular"}
    cache = new.emit("TensorScatter", [past, rows, slots], {"axis": -2, **mode}, shape=dims(past))
    count = _emit_total_length(new, length, rows)
    if ring is not None:
        count = new.emit("Min", [count, new.emit_integers(ring)], shape=[1])
    valid = new.emit("Expand", [count, batches], shape=[batch])
    new.insert()
    for node, position in list(present.uses()):
        if node not in slotted:
            _restore_reader(node, position, cache, lambda new: _emit_total_length(new, length, rows))
            continue
        node.replace_input_with(position, cache)
        if len(node.inputs) <= NONPAD:
            node.resize_inputs(NONPAD + 1)
        node.replace_input_with(NONPAD, valid)

    graph = concat.graph
    assert isinstance(graph, ir.Graph) and past.name is not None and present.name is not None
    name, present.name = present.name, None
    cache.name = name
    graph.outputs[list(graph.outputs).index(present)] = cache
    graph.remove(concat, safe=True)
    return past.name, name


def _emit_past_length(new: Rewrite, length: ir.Value) -> ir.Value:
    """Emit P as int64 [1]."""
    return new.emit("Unsqueeze", [length, new.emit_integers(0)], shape=[1])


def _emit_total_length(new: Rewrite, length: ir.Value, rows: ir.Value) -> ir.Value:
    """Emit P + S as int64 [1]."""
    new_rows = new.emit_size(rows, LENGTH_AXIS)
    return new.emit("Add", [_emit_past_length(new, length), new_rows], shape=[1])


def _restore_reader(node: ir.Node, position: int, cache: ir.Value, count: Callable[[Rewrite], ir.Value]) -> None:
    """Restore the operand of a reader of a growing cache: the shape of the valid rows, or a copy of them."""
    new = Rewrite(node)
    if not is_op(node, "Shape"):
        batch, heads, _, size = dims(cache)
        bounds = [new.emit_integers(0), count(new), new.emit_integers(LENGTH_AXIS)]
        rows = new.emit("Slice", [cache, *bounds], shape=[batch, heads, ir.SymbolicDim(None), size])
        new.replace_input(position, rows)
        return
    start, end, _ = slice(attribute(node, "start", 0), attribute(node, "end", None)).indices(4)
    axes = range(start, end)
    sizes = [count(new) if axis == LENGTH_AXIS else new.emit_size(cache, axis) for axis in axes]
    new.replace([node], node.outputs[0], new.emit_shape(sizes))
