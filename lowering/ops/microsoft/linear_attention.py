"""com.microsoft LinearAttention: that of ai.onnx, with heads of the state that share a query, or keys."""

from __future__ import annotations

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..linear_attention import Rows, state_and_output
from . import DOMAIN


@op("LinearAttention", since=1, domain=DOMAIN)
def linear_attention(
    node: Node,
    query: Value,
    key: Value,
    value: Value,
    past_state: Value | None = None,
    decay: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, Value]:
    rows = Rows(query, key, value, decay, beta)
    return state_and_output(node, rows, past_state, head_counts(node), shared_keys=True)


def head_counts(node: Node) -> tuple[int, int]:
    """Heads of queries and of the state. Raises NodeError for what is not supported."""
    q_heads, kv_heads = node.attr("q_num_heads"), node.attr("kv_num_heads")
    if q_heads < 1 or kv_heads < 1 or max(q_heads, kv_heads) % min(q_heads, kv_heads):
        raise node.error(
            f"attributes q_num_heads and kv_num_heads are {q_heads} and {kv_heads}.",
            "Make one a positive multiple of the other.",
        )
    if node.attr("state_window", 0):
        raise node.error("attribute state_window asks for states behind earlier tokens.", "Leave it at 0.")
    return q_heads, kv_heads
