"""com.microsoft LinearAttention: the operator of ai.onnx, with heads of the state that share a query, or keys."""

from __future__ import annotations

from ....importing.node import Node
from ....importing.values import Value
from ... import op
from ...attention.linear_attention import LinearAttentionInputs, emit_linear_attention
from ...helpers.requirements import reject_attribute
from .. import DOMAIN


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
    rows = LinearAttentionInputs(query, key, value, decay, beta)
    return emit_linear_attention(node, rows, past_state, read_head_counts(node), shared_keys=True)


def read_head_counts(node: Node) -> tuple[int, int]:
    """Return the numbers of heads of queries and of the state.

    Raises:
        NodeError: the numbers or attribute state_window are unsupported.
    """
    q_heads, kv_heads = node.attr("q_num_heads"), node.attr("kv_num_heads")
    if q_heads < 1 or kv_heads < 1 or max(q_heads, kv_heads) % min(q_heads, kv_heads):
        raise node.error(
            "linear_attention.heads_not_divisible",
            f"attributes q_num_heads and kv_num_heads are {q_heads} and {kv_heads}.",
            "Make one a positive multiple of the other.",
        )
    reject_attribute(node, "state_window", 0, "Leave it at 0: the states after earlier tokens are not supported.")
    return q_heads, kv_heads
