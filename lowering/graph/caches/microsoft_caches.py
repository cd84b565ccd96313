"""Conversion of attention operators of com.microsoft with growing caches to ai.onnx Attention with the same caches.

GroupQueryAttention counts the tokens of each sequence (seqlens_k), which exporters compute from the attention mask. The
mask itself is passed to Attention: a token then sees the unmasked keys up to its own, and its position is the number of
such keys before it. For sequences that are padded on the right, or not at all, nothing changes. Sequences that are
padded on the left, for which GroupQueryAttention has no useful result, have the same result as without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import ModelError
from ..rewriting.attention_node import emit_attention
from ..rewriting.matching import Rewrite, attribute, dims, is_op, is_static, read_number, read_static_sizes

MICROSOFT_DOMAIN = "com.microsoft"
LENGTH_AXIS = 2  # axis of caches


def to_attention(node: ir.Node) -> ir.Node:
    """Return the ai.onnx Attention that replaces a GroupQueryAttention or a MultiHeadAttention with a past.

    Raises:
        ModelError: Attention cannot replace the node.
    """
    emit = _from_group_query if node.op_type == "GroupQueryAttention" else _from_multi_head
    emitted = emit(node, _NodeInputs(node))
    if emitted is None:
        raise ModelError(
            "model.cache_unsupported",
            f"node '{node.name}' ({node.op_type}) stores its past in a form that static_cache and serve do not "
            "support: quantized caches, packed inputs, or lengths that are not the sums of an attention mask. "
            "Export it with past_key and past_value of ai.onnx Attention.",
        )
    new, operands, attributes = emitted
    return _replace(node, new, operands, attributes)


EmittedAttention = tuple[Rewrite, list[ir.Value | None], dict[str, Any]]


class _NodeInputs:
    """Inputs of a node by position; None for those that are absent."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    def __getitem__(self, position: int) -> ir.Value | None:
        return self.node.inputs[position] if position < len(self.node.inputs) else None


def _from_group_query(node: ir.Node, inputs: _NodeInputs) -> EmittedAttention | None:
    query, past, cos, sin = inputs[0], inputs[3], inputs[7], inputs[8]
    mask = _find_mask_of_lengths(inputs[5])
    unsupported = [inputs[k] for k in (12, 13, 16)]  # scales of quantized caches, query_seqlens
    names = ("qk_output", "sliding_window_cache")
    if mask is None or past is None or any(unsupported) or any(attribute(node, name, 0) > 0 for name in names):
        return None
    if not attribute(node, "causal", 1) or query is None or len(dims(past)) != 4 or not is_static(dims(past)[3]):
        return None
    heads, kv_heads, size = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0), dims(past)[3]
    assert isinstance(size, int)
    new = Rewrite(node)
    q, k, v = query, inputs[1], inputs[2]
    if k is None or v is None:
        q, k, v = new.emit_slices(query, [heads * size, kv_heads * size, kv_heads * size])
    common_epsilon = attribute(node, "qk_norm_epsilon", 1e-6)
    q = _emit_norm(new, q, (heads, size), inputs[14], attribute(node, "q_norm_epsilon", common_epsilon))
    k = _emit_norm(new, k, (kv_heads, size), inputs[15], attribute(node, "k_norm_epsilon", common_epsilon))
    if attribute(node, "do_rotary", 0):
        if cos is None or sin is None or len(dims(cos)) != 2 or not is_static(dims(cos)[1]):
            return None
        positions = inputs[9] if inputs[9] is not None else _emit_positions(new, mask, past)
        rotated = 2 * dims(cos)[1]
        rotation = {"interleaved": attribute(node, "rotary_interleaved", 0)}
        rotation["rotary_embedding_dim"] = 0 if rotated == size else rotated
        q = _emit_rotation(new, q, [cos, sin, positions], {**rotation, "num_heads": heads})
        k = _emit_rotation(new, k, [cos, sin, positions], {**rotation, "num_heads": kv_heads})
    allowed = _emit_key_mask(new, mask)
    bias = inputs[10]
    if bias is not None:
        lowest = new.emit_constant(np.array(-np.inf), bias.dtype or ir.DataType.FLOAT)
        allowed = new.emit("Where", [allowed, bias, lowest], dtype=bias.dtype, shape=dims(bias))
    attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads, "is_causal": 1}
    attributes["scale"] = attribute(node, "scale", 0.0) or 1 / math.sqrt(size)
    attributes["softcap"] = max(attribute(node, "softcap", 0.0), 0.0)
    if (window := attribute(node, "local_window_size", -1)) > 0:
        attributes["left_window_size"] = window - 1
    sink = inputs[11]
    if sink is not None:
        sink = new.emit_cast(sink, q.dtype or ir.DataType.FLOAT)
    elif attribute(node, "smooth_softmax", -1) == 1:
        sink = new.emit_constant(np.zeros(heads), q.dtype or ir.DataType.FLOAT)
    return new, [q, k, v, allowed, past, inputs[4], None, sink], attributes


def _from_multi_head(node: ir.Node, inputs: _NodeInputs) -> EmittedAttention | None:
    query, key, value, biases, padding, bias, past, past_value = (inputs[k] for k in range(8))
    if query is None or key is None or value is None or past is None or past_value is None:
        return None
    if any(len(dims(x)) != 3 for x in (query, key, value)) or any(inputs[k] is not None for k in (8, 9)):
        return None
    if padding is not None and (len(dims(padding)) != 2 or dims(padding)[1] == 1):
        return None
    if bias is not None and dims(bias)[-1:] in ((), (1,)):  # one number for all keys
        return None
    heads, size = attribute(node, "num_heads", 0), dims(past)[3]
    if not isinstance(size, int):
        return None
    new = Rewrite(node)
    q, k, v = query, key, value
    if biases is not None:
        widths = read_static_sizes(dims(x)[2] for x in (q, k, v))
        if widths is None:
            return None
        bias_slices = zip((q, k, v), new.emit_slices(biases, widths), strict=True)
        q, k, v = (new.emit("Add", [x, bias_slice], shape=dims(x)) for x, bias_slice in bias_slices)
    mask = bias
    if padding is not None:
        dtype = q.dtype or ir.DataType.FLOAT
        fills = (0.0, attribute(node, "mask_filter_value", -10000.0))
        zero, hidden = (new.emit_constant(np.array(fill_value), dtype) for fill_value in fills)
        mask = new.emit("Where", [_emit_key_mask(new, padding), zero, hidden], dtype=dtype)
        if bias is not None:
            mask = new.emit("Add", [mask, bias], shape=dims(bias))
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, "is_causal": int(attribute(node, "unidirectional", 0))}
    attributes["scale"] = attribute(node, "scale", 0.0) or 1 / math.sqrt(size)
    attributes["qk_matmul_output_mode"] = 2  # scores with masks
    return new, [q, k, v, mask, past, past_value], attributes


def _replace(node: ir.Node, new: Rewrite, operands: list[ir.Value | None], attributes: dict[str, Any]) -> ir.Node:
    y = emit_attention(new, operands, attributes, shape=dims(node.outputs[0]))
    attention = y.producer()
    assert attention is not None
    attention.resize_outputs(len(node.outputs))
    for old, output in zip(node.outputs, attention.outputs):
        output.type, output.shape = old.type, old.shape
    new.replace_anchor(attention.outputs)
    return attention


def _find_mask_of_lengths(lengths: ir.Value | None) -> ir.Value | None:
    """Return the mask [B, T] whose row sums, less 1, are seqlens_k."""
    minus = _skip_casts(lengths)
    node = minus.producer() if minus is not None else None
    if (
        node is None
        or not is_op(node, "Sub", "Add")
        or read_number(node.inputs[1]) != (1 if node.op_type == "Sub" else -1)
    ):
        return None
    total = _skip_casts(node.inputs[0])
    node = total.producer() if total is not None else None
    if node is None or not is_op(node, "ReduceSum"):
        return None
    mask = _skip_casts(node.inputs[0])
    return mask if mask is not None and mask.is_graph_input() and len(dims(mask)) == 2 else None


def _skip_casts(value: ir.Value | None) -> ir.Value | None:
    while value is not None and is_op(value.producer(), "Cast", "Squeeze", "Unsqueeze"):
        node = value.producer()
        assert node is not None
        value = node.inputs[0]
    return value


def _emit_norm(new: Rewrite, x: ir.Value, heads: tuple[int, int], weight: ir.Value | None, epsilon: float) -> ir.Value:
    if weight is None:
        return x
    split = new.emit("Reshape", [x, new.emit_integers(0, 0, *heads)], shape=[*dims(x)[:2], *heads])
    y = new.emit("RMSNormalization", [split, weight], {"axis": -1, "epsilon": epsilon}, shape=dims(split))
    return new.emit("Reshape", [y, new.emit_integers(0, 0, -1)], shape=dims(x))


def _emit_rotation(new: Rewrite, x: ir.Value, tables: Sequence[ir.Value], attributes: dict[str, int]) -> ir.Value:
    return new.emit("RotaryEmbedding", [x, *tables], attributes, shape=dims(x))


def _emit_positions(new: Rewrite, mask: ir.Value, past: ir.Value) -> ir.Value:
    """Return [B, S]: how many keys of the mask come before each new token's own, 0 for padding."""
    axis = new.emit_constant(np.array(1), ir.DataType.INT64)
    counted = new.emit("CumSum", [new.emit_cast(mask, ir.DataType.INT64), axis], shape=dims(mask))
    before = new.emit("Sub", [counted, new.emit_integers(1)], shape=dims(mask))
    at = new.emit("Max", [before, new.emit_integers(0)], shape=dims(mask))
    bounds = [new.emit_size(past, LENGTH_AXIS), new.emit_integers(np.iinfo(np.int64).max), new.emit_integers(1)]
    return new.emit("Slice", [at, *bounds], shape=[dims(mask)[0], ir.SymbolicDim(None)])


def _emit_key_mask(new: Rewrite, mask: ir.Value) -> ir.Value:
    """Return a mask [B, T] of numbers as bool [B, 1, 1, T]."""
    allowed = new.emit_cast(mask, ir.DataType.BOOL)
    batch, keys = dims(mask)
    return new.emit("Unsqueeze", [allowed, new.emit_integers(1, 2)], shape=[batch, 1, 1, keys])
