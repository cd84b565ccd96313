"""Caches of layers with a sliding window: rings of slots, which contain only the newest keys.

Key t is in slot t % R of a cache of R slots. A row whose window begins `left` keys before its own finds all of them if
its call writes at most R - left new rows. The key of a slot follows from the number of tokens alone, so Attention reads
the slots in memory order: its mask is permuted to the order of the slots.

Before: Attention(q, keys, values, mask, causal or with a window or not). After: Attention(q, ring, ring, mask by slot).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir

from ..loading.declared_sizes import set_sizes
from ..rewriting.attention_node import MASK, attention_input
from ..rewriting.matching import Rewrite, attribute, dims, is_op, operand
from ..rewriting.sizes import InferSizesPass
from .cache_forms import K, V
from .mask_patterns import find_left_windows
from .positions import Positions
from .roles import InputRoles

_ROWS = 512  # new rows that every ring admits per call, so that prompts need few calls
_MULTIPLE = 64  # of the number of slots


def ring_slots(left: int) -> int:
    """Return the number of slots of a ring for a window that begins `left` keys before a row's own."""
    return -(-(left + max(left + 1, _ROWS)) // _MULTIPLE) * _MULTIPLE


def find_windows(
    model: ir.Model, roles: InputRoles, attentions: Collection[ir.Node], grown: Collection[ir.Node], capacity: int
) -> dict[ir.Node, int]:
    """Return, by Concat of a cache, how many keys before its own a token of any reader sees.

    The result contains the caches for which a ring has fewer slots than `capacity`, whose only readers are
    `attentions`, and whose window is proven for all positions up to the capacity. Sizes are inferred.
    """
    candidates = [concat for concat in grown if _is_read_only_by(concat, attentions)]
    if ring_slots(0) >= capacity or not candidates:
        return {}
    order = {node: index for index, node in enumerate(model.graph)}
    sequence_model = _make_sequence_model(model, roles)
    if sequence_model is None:
        return {}
    nodes, positions = (
        list(sequence_model.graph),
        _make_positions(sequence_model, roles, [operand(c, 0).name for c in grown]),
    )
    windows_by_node = find_left_windows(positions, [nodes[order[node]] for node in attentions], capacity)
    lefts = dict(zip(attentions, windows_by_node.values()))
    windows_by_cache: dict[ir.Node, int] = {}
    for concat in candidates:
        sides = [lefts[use.node] for use in concat.outputs[0].uses() if use.node in lefts]
        bounded = [left for left in sides if left is not None]
        if bounded and len(bounded) == len(sides) and ring_slots(max(bounded)) < capacity:
            windows_by_cache[concat] = max(bounded)
    pairs = [[c for c in grown if c.outputs[0] in node.inputs[K : V + 1]] for node in attentions]
    while split := [pair for pair in pairs if len({windows_by_cache.get(concat) for concat in pair}) > 1]:
        for concat in {concat for pair in split for concat in pair} & windows_by_cache.keys():
            del windows_by_cache[concat]  # keys and values have the same slots
    return windows_by_cache


def mask_by_slot(node: ir.Node, length: ir.Value, total: ir.Value, slots: int) -> None:
    """Let an Attention read rings: its mask, causality and window become one mask [.., S, slots].

    Args:
        length: int64 [1], the number of tokens before the call.
        total: int64 [1], the number after it.
    """
    new = Rewrite(node)
    one_value, count = new.emit_integers(1), new.emit_integers(slots)
    newest = new.emit("Sub", [total, one_value], shape=[1])
    back = new.emit("Sub", [newest, new.emit_integers(*range(slots))], shape=[slots])
    age = new.emit("Mod", [back, count], shape=[slots])
    keys = new.emit("Sub", [newest, age], shape=[slots])  # negative for an empty slot
    mask = attention_input(node, MASK)
    if mask is not None:
        clamped = new.emit("Max", [keys, new.emit_integers(0)], shape=[slots])
        mask = new.emit("Gather", [mask, clamped], {"axis": -1}, shape=[*dims(mask)[:-1], slots])
    visible = _emit_visible(new, node, length, total, keys)
    if visible is not None and mask is None:
        mask = visible
    elif visible is not None and mask is not None and mask.dtype == ir.DataType.BOOL:
        mask = new.emit("And", [mask, visible])
    elif visible is not None and mask is not None and mask.dtype is not None:
        hidden = new.emit_constant(np.array(-np.inf), mask.dtype)
        mask = new.emit("Where", [visible, mask, hidden], dtype=mask.dtype)
    new.replace_input(MASK, mask)
    for name in ("is_causal", "left_window_size", "right_window_size"):
        node.attributes.pop(name, None)


def _emit_visible(new: Rewrite, node: ir.Node, length: ir.Value, total: ir.Value, keys: ir.Value) -> ir.Value | None:
    """Return the keys that causality and windows of the node show, bool [S, slots]; None if it has neither."""
    right = 0 if attribute(node, "is_causal", 0) else attribute(node, "right_window_size", -1)
    left = attribute(node, "left_window_size", -1)
    if right < 0 and left < 0:
        return None
    first, end = (new.emit("Squeeze", [size, new.emit_integers(0)], shape=[]) for size in (length, total))
    step = new.emit_constant(np.array(1), ir.DataType.INT64)
    rows = new.emit("Range", [first, end, step], shape=[ir.SymbolicDim(None)])
    column = new.emit("Unsqueeze", [rows, new.emit_integers(1)], shape=[ir.SymbolicDim(None), 1])
    shape = [ir.SymbolicDim(None), *dims(keys)]
    distance = new.emit("Sub", [column, keys], shape=shape)
    sides = []
    if right >= 0:
        sides.append(
            new.emit("GreaterOrEqual", [distance, new.emit_integers(-right)], dtype=ir.DataType.BOOL, shape=shape)
        )
    if left >= 0:
        sides.append(new.emit("LessOrEqual", [distance, new.emit_integers(left)], dtype=ir.DataType.BOOL, shape=shape))
    return sides[0] if len(sides) == 1 else new.emit("And", sides, shape=shape)


def _is_read_only_by(concat: ir.Node, attentions: Collection[ir.Node]) -> bool:
    """Return whether only attentions read a cache; a Shape reads no elements."""
    readers = [use.node for value in (operand(concat, 0), concat.outputs[0]) for use in value.uses()]
    return all(node is concat or node in attentions or is_op(node, "Shape") for node in readers)


def _make_sequence_model(model: ir.Model, roles: InputRoles) -> ir.Model | None:
    """Return a copy for a batch of one; None if the batch is another number, or ids are unknown."""
    ids = next((value for value in model.graph.inputs if value.name == roles.ids), None)
    if ids is None or len(dims(ids)) < 2:
        return None
    batch = dims(ids)[0]
    if isinstance(batch, int):
        copy = model.clone() if batch == 1 else None
    else:
        copy = set_sizes(model, {str(batch.value): 1})
    if copy is not None:
        InferSizesPass()(copy)
    return copy


def _make_positions(model: ir.Model, roles: InputRoles, pasts: list[str | None]) -> Positions:
    inputs: Mapping[str | None, ir.Value] = {value.name: value for value in model.graph.inputs}
    mask, positions = inputs.get(roles.mask), inputs.get(roles.positions)
    return Positions(model, inputs[roles.ids], mask, positions, [inputs[name] for name in pasts])
