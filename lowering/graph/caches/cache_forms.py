"""Canonicalization of growing caches, in whatever form an exporter wrote them.

The canonical form is Concat of a past input and new rows, read by Attention. Operators of com.microsoft become
Attention first (microsoft_caches.py).

Before: an Attention that takes past_key and past_value [B, Hkv, P, D] from inputs of the model, and returns present_key
and present_value [B, Hkv, P + S, D] as outputs. After: two Concat along the length, and an Attention of all keys
without a past. Its nonpad_kv_seqlen is the number of all keys, so that is_causal and windows count from the end: row i
of S still sees the keys up to P + i.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from ..loading.legality import import_own_domain, record_opset
from ..rewriting.attention_node import (
    MASK,
    NONPAD,
    PAST_KEY,
    PAST_VALUE,
    SINK,
    attention_input,
    emit_attention,
    is_attention,
)
from ..rewriting.matching import Rewrite, Size, attribute, dims, is_op, is_static, operand
from ..rewriting.opset import ATTENTION_OPSET, UpgradeOpsetPass, opset
from ..rewriting.sizes import InferSizesPass
from .joint_kv_caches import split_joint_caches
from .microsoft_caches import LENGTH_AXIS, MICROSOFT_DOMAIN, to_attention

K, V = 1, 2  # inputs of Attention
_PAST = (PAST_KEY, PAST_VALUE)
_PAST_BY_OPERATOR = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}  # of com.microsoft
_PRESENT = (1, 2)  # outputs of all
OPSET = 24  # of nonpad_kv_seqlen and TensorScatter
_OPSET_OF_WINDOWS = 25


def unify_caches(model: ir.Model) -> None:
    """Rewrite every attention of a fused model that has a growing cache."""
    UpgradeOpsetPass()(model)  # which fuse reverts if no pattern matches
    InferSizesPass()(model)
    split_joint_caches(model)
    nodes = [node for node in model.graph if _has_growing_caches(node)]
    if not nodes or opset(model) < ATTENTION_OPSET:
        return
    use_opset_24(model)
    for node in [node if is_attention(node) else to_attention(node) for node in nodes]:
        if attribute(node, "left_window_size", -1) != -1:
            set_opset(model, _OPSET_OF_WINDOWS)
        _rewrite_attention(node)
    import_own_domain(model)


def is_growing_cache(node: ir.Node) -> bool:
    """Return whether the node is Concat(past, new) along the length, from an input past to an output."""
    if not is_op(node, "Concat") or len(node.inputs) != 2 or not node.outputs[0].is_graph_output():
        return False
    past = operand(node, 0)
    return past.is_graph_input() and len(dims(past)) == 4 and attribute(node, "axis", 0) in (LENGTH_AXIS, -2)


def drop_unused_inputs(model: ir.Model, rank: int | None = None) -> None:
    """Remove inputs that are not read, only those of rank `rank` if it is set.

    Exporters leave such pasts of cross attention.
    """
    outputs = set(model.graph.outputs)
    for value in list(model.graph.inputs):
        if rank in (None, len(dims(value))) and not value.uses() and value not in outputs:
            model.graph.inputs.remove(value)


def is_counting_all_keys(node: ir.Node) -> bool:
    """Return whether nonpad_kv_seqlen of an Attention is the number of its keys.

    Causal rows are the last ones then.
    """
    lengths = attention_input(node, NONPAD)
    expand = lengths.producer() if lengths is not None else None
    count = operand(expand, 0).producer() if expand is not None and is_op(expand, "Expand") else None
    if count is None or not is_op(count, "Shape") or operand(count, 0) is not node.inputs[K]:
        return False
    return (attribute(count, "start", 0), attribute(count, "end", None)) == (LENGTH_AXIS, LENGTH_AXIS + 1)


def can_read_slots(node: ir.Node, grown: Collection[ir.Node]) -> bool:
    """Return whether an Attention can read its keys and its values, each a Concat of `grown`, from slots.

    It cannot, and needs the valid rows as they are, if it aligns a causal mask or a window with the first key. Nor can
    it if it has caches of its own, or returns scores or caches.
    """
    is_after_past = is_counting_all_keys(node)
    allowed = (NONPAD, SINK) if is_after_past else (SINK,)
    other_inputs = [value for k, value in enumerate(node.inputs) if k >= PAST_KEY and k not in allowed]
    if any(value is not None for value in other_inputs):
        return False
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return False
    sides = [attribute(node, f"{side}_window_size", -1) for side in ("left", "right")]
    is_aligned = attribute(node, "is_causal", 0) == 1 or sides != [-1, -1]
    return (is_after_past or not is_aligned) and all(operand(node, k).producer() in grown for k in (K, V))


def use_opset_24(model: ir.Model) -> None:
    """Convert opset 23 to 24, and repeat masks of one key for all keys.

    Opset 23 broadcasts such a mask; opset 24 hides the other keys.
    """
    if opset(model) < OPSET:
        for node in [n for n in model.graph if is_op(n, "Attention") and len(n.inputs) > MASK and n.inputs[MASK]]:
            _repeat_mask(node)
        set_opset(model, OPSET)


def set_opset(model: ir.Model, version: int) -> None:
    """Declare an opset in which no operator of the model has another meaning."""
    record_opset(model)
    for domain in {"", "ai.onnx"} & set(model.opset_imports):
        model.opset_imports[domain] = max(version, model.opset_imports[domain])
    imports = [onnx.helper.make_opsetid("", version)]
    model.ir_version = max(model.ir_version, onnx.helper.find_min_ir_version_for(imports))


def _repeat_mask(node: ir.Node) -> None:
    mask, key = operand(node, MASK), operand(node, K)
    if dims(mask)[-1:] != (1,):
        return
    new = Rewrite(node)
    keys = new.emit_size(key, -2)
    if (past := node.inputs[_PAST[0]] if len(node.inputs) > _PAST[0] else None) is not None:
        keys = new.emit("Add", [keys, new.emit_size(past, -2)], shape=[1])
    shape = new.emit("Concat", [new.emit_integers(*(1 for _ in dims(mask)[1:])), keys], {"axis": 0})
    full = new.emit("Expand", [mask, shape], shape=[*dims(mask)[:-1], ir.SymbolicDim(None)])
    new.replace_input(MASK, full)


def _has_growing_caches(node: ir.Node) -> bool:
    """Return whether keys and values of an attention are each a past input and new rows, and outputs."""
    positions = (
        _PAST
        if is_attention(node)
        else _PAST_BY_OPERATOR.get(node.op_type)
        if node.domain == MICROSOFT_DOMAIN
        else None
    )
    if positions is None or len(node.inputs) <= positions[1] or len(node.outputs) <= _PRESENT[1]:
        return False
    pasts, presents = [node.inputs[k] for k in positions], [node.outputs[k] for k in _PRESENT]
    caches = [past for past in pasts if past is not None and past.is_graph_input() and len(dims(past)) == 4]
    sizes = [size for past in caches for size in (dims(past)[1], dims(past)[3])]
    is_growing = (
        len(caches) == 2 and all(present.is_graph_output() for present in presents) and all(map(is_static, sizes))
    )
    return is_growing and not (is_attention(node) and _has_other_row_count(node))


def _has_other_row_count(node: ir.Node) -> bool:
    """Return whether an Attention has another number of rows than of new keys.

    Its causal mask then does not end with the last key.
    """
    q, k = (dims(value) for value in (operand(node, 0), operand(node, K)))
    if len(q) != len(k) or len(q) not in (3, 4):
        return True
    rows, keys = q[-2], k[-2]
    return rows != keys and isinstance(rows, int) == isinstance(keys, int) and str(rows) != str(keys)


def _rewrite_attention(node: ir.Node) -> None:
    new = Rewrite(node)
    pasts = [operand(node, k) for k in _PAST]
    is_flat = len(dims(operand(node, 0))) == 3
    q = operand(node, 0)
    if is_flat:
        q = split_heads(new, q, attribute(node, "q_num_heads", 0), dims(pasts[0])[3])
    presents = []
    for past, rows, present in zip(pasts, node.inputs[1:3], node.outputs[1:3]):
        assert rows is not None
        if is_flat:
            rows = split_heads(new, rows, dims(past)[1], dims(past)[3])
        presents.append(new.emit("Concat", [past, rows], {"axis": LENGTH_AXIS}, shape=dims(present)))
    attention = _emit_attention(new, node, q, presents)
    y = attention.outputs[0]
    if is_flat:
        y = new.emit_transpose(y, (0, 2, 1, 3))
        y = new.emit("Reshape", [y, new.emit_integers(0, 0, -1)], shape=dims(node.outputs[0]))
    new.replace_anchor([y, *presents, *attention.outputs[3:]])


def split_heads(new: Rewrite, flat: ir.Value, heads: Size, size: Size) -> ir.Value:
    """Return [B, H, S, D] of [B, S, H * D]."""
    assert isinstance(heads, int) and isinstance(size, int)
    batch, rows, _ = dims(flat)
    split = new.emit("Reshape", [flat, new.emit_integers(0, 0, heads, size)], shape=[batch, rows, heads, size])
    return new.emit_transpose(split, (0, 2, 1, 3))


def _emit_attention(new: Rewrite, node: ir.Node, q: ir.Value, presents: list[ir.Value]) -> ir.Node:
    """Emit the Attention of all keys, causal from the end on."""
    k, v = presents
    batch, keys = new.emit_size(q, 0), new.emit_size(k, LENGTH_AXIS)
    nonpad = new.emit("Expand", [keys, batch], shape=[dims(q)[0]])
    mask, sink = (attention_input(node, position) for position in (MASK, SINK))
    attributes = {
        name: stored.value for name, stored in node.attributes.items() if name not in ("q_num_heads", "kv_num_heads")
    }
    shape = [*dims(q)[:3], dims(v)[3]]
    y = emit_attention(new, [q, k, v, mask, None, None, nonpad, sink], attributes, shape=shape)
    attention = y.producer()
    assert attention is not None
    if len(node.outputs) > 3:
        attention.resize_outputs(4)
        scores = attention.outputs[3]
        scores.type, scores.shape = node.outputs[3].type, node.outputs[3].shape
    return attention
