"""Attention as a node: the operator of ai.onnx, or the compiler's own.

The latter is ai.onnx Attention 25 with sinks as one more input. A sink is a score of a query head that takes its share
of each softmax and has no value (arXiv:2309.17453). Inputs are Q, K, V, attn_mask, past_key, past_value,
nonpad_kv_seqlen and sink [Hq], in the type of Q.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from ..loading.legality import OWN_DOMAIN
from .matching import Rewrite, Size, is_op

MASK, PAST_KEY, PAST_VALUE, NONPAD, SINK = range(3, 8)
"""Inputs of Attention."""


def is_attention(node: ir.Node | None) -> bool:
    """Return whether the node is ai.onnx Attention, with or without sinks."""
    is_own = node is not None and node.domain == OWN_DOMAIN and node.op_type == "Attention"
    return is_op(node, "Attention") or is_own


def attention_input(node: ir.Node, position: int) -> ir.Value | None:
    """Return an input of an Attention; None for one that is absent."""
    return node.inputs[position] if position < len(node.inputs) else None


def emit_attention(
    new: Rewrite,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
    *,
    dtype: ir.DataType | None = None,
    shape: Iterable[Size] | None = None,
) -> ir.Value:
    """Emit an Attention of up to eight inputs and return its output.

    It is the operator of ai.onnx if there is no sink.
    """
    trimmed = list(inputs)
    while trimmed and trimmed[-1] is None:
        trimmed.pop()
    domain = OWN_DOMAIN if len(trimmed) > SINK else ""
    return new.emit("Attention", trimmed, attributes, dtype, shape, domain=domain)
