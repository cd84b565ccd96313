"""Attention operators of com.microsoft with growing caches become ai.onnx Attention with the same caches.

GroupQueryAttention counts the tokens of each sequence (seqlens_k), which exporters compute from the attention mask.
The mask itself goes to Attention: a token then sees what the mask has of the keys up to its own, and its position is
the number of such keys before it. For sequences that are padded on the right, or not at all, nothing changes. Sequences
that are padded on the left, of which GroupQueryAttention makes nothing useful, get what they get without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..errors import ModelError
from ..fusion.attention_node import emit_attention
from ..fusion.matching import Rewrite, attribute, dims, is_op, known, number, numbers

DOMAIN = "com.microsoft"
LENGTH_AXIS = 2  # of caches


def to_attention(node: ir.Node) -> ir.Node:
    """Return the ai.onnx Attention that replaces a GroupQueryAttention or a MultiHeadAttention with a past.

    Raises ModelError for one that Attention cannot replace.
    """
    emit = _from_group_query if node.op_type == "GroupQueryAttention" else _from_multi_head
    emitted = emit(node, _Inputs(node))
    if emitted is None:
        raise ModelError(
            f"node '{node.name}' ({node.op_type}) keeps its past in a form that static_cache and serve do not know: "
            "quantized caches, packed inputs, or lengths that are not the sums of an attention mask. Export it "
            "with past_key and past_value of ai.onnx Attention."
        )
    new, operands, attributes = emitted
    return _replace(node, new, operands, attributes)


Emitted = tuple[Rewrite, list[ir.Value | None], dict[str, Any]]


class _Inputs:
    """Inputs of a node by position; None for those that are absent."""

    def __init__(self, node: ir.Node) -> None:
        self.node = node

    def __getitem__(self, position: int) -> ir.Value | None:
        return self.node.inputs[position] if position < len(self.node.inputs) else None


def _from_group_query(node: ir.Node, inputs: _Inputs) -> Emitted | None:
    query, past, cos, sin = inputs[0], inputs[3], inputs[7], inputs[8]
    mask = _mask_of_lengths(inputs[5])
    unsupported = [inputs[k] for k in (12, 13, 16)]  # scales of quantized caches, query_seqlens
    names = ("qk_output", "sliding_window_cache")
    if mask is None or past is None or any(unsupported) or any(attribute(node, name, 0) > 0 for name in names):
        return None
    if not attribute(node, "causal", 1) or query is None or len(dims(past)) != 4 or not known(dims(past)[3]):
        return None
    heads, kv_heads, size = attribute(node, "num_heads", 0), attribute(node, "kv_num_heads", 0), dims(past)[3]
    assert isinstance(size, int)
    new = Rewrite(node)
    q, k, v = query, inputs[1], inputs[2]
    if k is None or v is None:
        q, k, v = _split(new, query, [heads * size, kv_heads * size, kv_heads * size])
    both = attribute(node, "qk_norm_epsilon", 1e-6)
    q = _normalize(new, q, (heads, size), inputs[14], attribute(node, "q_norm_epsilon", both))
    k = _normalize(new, k, (kv_heads, size), inputs[15], attribute(node, "k_norm_epsilon", both))
    if attribute(node, "do_rotary", 0):
        if cos is None or sin is None or len(dims(cos)) != 2 or not known(dims(cos)[1]):
            return None
        positions = inputs[9] if inputs[9] is not None else _positions(new, mask, past)
        rotated = 2 * dims(cos)[1]
        rotation = {"interleaved": attribute(node, "rotary_interleaved", 0)}
        rotation["rotary_embedding_dim"] = 0 if rotated == size else rotated
        q = _rotate(new, q, [cos, sin, positions], {**rotation, "num_heads": heads})
        k = _rotate(new, k, [cos, sin, positions], {**rotation, "num_heads": kv_heads})
    allowed = _keys_of(new, mask)
    bias = inputs[10]
    if bias is not None:
        lowest = new.constant(np.array(-np.inf), bias.dtype or ir.DataType.FLOAT)
        allowed = new.emit("Where", [allowed, bias, lowest], dtype=bias.dtype, shape=dims(bias))
    attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads, "is_causal": 1}
    attributes["scale"] = attribute(node, "scale", 0.0) or 1 / math.sqrt(size)
    attributes["softcap"] = max(attribute(node, "softcap", 0.0), 0.0)
    if (window := attribute(node, "local_window_size", -1)) > 0:
        attributes["left_window_size"] = window - 1
    sink = inputs[11]
    if sink is not None:
        sink = new.cast(sink, q.dtype or ir.DataType.FLOAT)
    elif attribute(node, "smooth_softmax", -1) == 1:
        sink = new.constant(np.zeros(heads), q.dtype or ir.DataType.FLOAT)
    return new, [q, k, v, allowed, past, inputs[4], None, sink], attributes


def _from_multi_head(node: ir.Node, inputs: _Inputs) -> Emitted | None:
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
        widths = numbers(dims(x)[2] for x in (q, k, v))
        if widths is None:
            return None
        parts = _split(new, biases, widths)
        q, k, v = (new.emit("Add", [x, part], shape=dims(x)) for x, part in zip((q, k, v), parts, strict=True))
    mask = bias
    if padding is not None:
        dtype = q.dtype or ir.DataType.FLOAT
        fills = (0.0, attribute(node, "mask_filter_value", -10000.0))
        zero, hidden = (new.constant(np.array(number), dtype) for number in fills)
        mask = new.emit("Where", [_keys_of(new, padding), zero, hidden], dtype=dtype)
        if bias is not None:
            mask = new.emit("Add", [mask, bias], shape=dims(bias))
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, "is_causal": int(attribute(node, "unidirectional", 0))}
    attributes["scale"] = attribute(node, "scale", 0.0) or 1 / math.sqrt(size)
    attributes["qk_matmul_output_mode"] = 2  # scores with masks
    return new, [q, k, v, mask, past, past_value], attributes


def _replace(node: ir.Node, new: Rewrite, operands: list[ir.Value | None], attributes: dict[str, Any]) -> ir.Node:
    y = emit_attention(new, operands, attributes, shape=dims(node.outputs[0]))
    attention = y.producer()
    assert attention is not None and isinstance(node.graph, ir.Graph)
    attention.resize_outputs(len(node.outputs))
    new.insert()
    for old, output in zip(node.outputs, attention.outputs):
        output.type, output.shape = old.type, old.shape
        old.replace_all_uses_with(output, replace_graph_outputs=True)
        output.name, old.name = old.name, None
    node.graph.remove(node, safe=True)
    return attention


def _mask_of_lengths(lengths: ir.Value | None) -> ir.Value | None:
    """Return the mask [B, T] of which seqlens_k is the sum of each row, less 1."""
    minus = _before_casts(lengths)
    node = minus.producer() if minus is not None else None
    if node is None or not is_op(node, "Sub", "Add") or number(node.inputs[1]) != (1 if node.op_type == "Sub" else -1):
        return None
    total = _before_casts(node.inputs[0])
    node = total.producer() if total is not None else None
    if node is None or not is_op(node, "ReduceSum"):
        return None
    mask = _before_casts(node.inputs[0])
    return mask if mask is not None and mask.is_graph_input() and len(dims(mask)) == 2 else None


def _before_casts(value: ir.Value | None) -> ir.Value | None:
    while value is not None and is_op(value.producer(), "Cast", "Squeeze", "Unsqueeze"):
        node = value.producer()
        assert node is not None
        value = node.inputs[0]
    return value


def _split(new: Rewrite, packed: ir.Value, widths: Sequence[int]) -> list[ir.Value]:
    """Return parts of so many elements along the last axis."""
    front = dims(packed)[:-1]
    parts, start = [], 0
    for width in widths:
        bounds = [new.integers(start), new.integers(start + width), new.integers(-1)]
        parts.append(new.emit("Slice", [packed, *bounds], shape=[*front, width]))
        start += width
    return parts


def _normalize(new: Rewrite, x: ir.Value, heads: tuple[int, int], weight: ir.Value | None, epsilon: float) -> ir.Value:
    if weight is None:
        return x
    split = new.emit("Reshape", [x, new.integers(0, 0, *heads)], shape=[*dims(x)[:2], *heads])
    y = new.emit("RMSNormalization", [split, weight], {"axis": -1, "epsilon": epsilon}, shape=dims(split))
    return new.emit("Reshape", [y, new.integers(0, 0, -1)], shape=dims(x))


def _rotate(new: Rewrite, x: ir.Value, tables: Sequence[ir.Value], attributes: dict[str, int]) -> ir.Value:
    return new.emit("RotaryEmbedding", [x, *tables], attributes, shape=dims(x))


def _positions(new: Rewrite, mask: ir.Value, past: ir.Value) -> ir.Value:
    """Return [B, S]: how many keys of the mask come before each new token's own, 0 for padding."""
    axis = new.constant(np.array(1), ir.DataType.INT64)
    counted = new.emit("CumSum", [new.cast(mask, ir.DataType.INT64), axis], shape=dims(mask))
    before = new.emit("Sub", [counted, new.integers(1)], shape=dims(mask))
    at = new.emit("Max", [before, new.integers(0)], shape=dims(mask))
    ends = {"start": LENGTH_AXIS, "end": LENGTH_AXIS + 1}
    start = new.emit("Shape", [past], ends, ir.DataType.INT64, [1])
    bounds = [start, new.integers(np.iinfo(np.int64).max), new.integers(1)]
    return new.emit("Slice", [at, *bounds], shape=[dims(mask)[0], ir.SymbolicDim(None)])


def _keys_of(new: Rewrite, mask: ir.Value) -> ir.Value:
    """Return a mask [B, T] of numbers as bool [B, 1, 1, T]."""
    allowed = new.cast(mask, ir.DataType.BOOL)
    batch, keys = dims(mask)
    return new.emit("Unsqueeze", [allowed, new.integers(1, 2)], shape=[batch, 1, 1, keys])
