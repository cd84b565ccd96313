"""ServedLinearAttention: linear attention of packed requests, each of which continues from its own state."""

from __future__ import annotations

from dataclasses import replace

from ...attention.linear import build_linear_attention
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value, static
from .. import op
from ..attention.linear_attention import FLOATS, LinearAttentionInputs, read_linear_attention
from ..helpers.assertions import assert_shape
from ..helpers.requirements import require_tensor
from ..microsoft.attention.linear_attention import read_head_counts
from .layer_states import select_layer_states


@op("ServedLinearAttention", since=1, domain=OWN_DOMAIN)
def served_linear_attention(
    node: Node,
    query: Value,
    key: Value,
    value: Value,
    first_rows: Value,
    row_counts: Value,
    past: Value,
    state_slots: Value,
    states: Value,
    decay: Value | None = None,
    beta: Value | None = None,
) -> tuple[Value, Value]:
    """Return output [1, N, heads Dv], and the pool with the states of layer `layer` after the new tokens.

    query, key, value, decay, beta [1, N, ...] and the attributes are those of com.microsoft LinearAttention. The tables
    [R] are those of PackedRequests. states is [slots, layers, kv_num_heads, D, Dv]. Request r has slot state_slots[r],
    whose state counts as zeros if past[r] is 0.
    """
    q_heads, kv_heads = read_head_counts(node)
    record, rows = read_linear_attention(
        node, LinearAttentionInputs(query, key, value, decay, beta), q_heads, kv_heads, shared_keys=True
    )
    shape = (*states.shape[:2], kv_heads, record.head_dim, record.v_head_dim)
    require_tensor(node, "states", states, FLOATS, "[slots, layers, kv_num_heads, D, Dv]")
    pool, pages = select_layer_states(node, state_slots, assert_shape(node, states, shape), past)
    record = replace(record, batch=static(past.shape[0]), state_dtype=states.dtype, packed=True)
    tables = [assert_shape(node, table, past.shape) for table in (first_rows, row_counts, past)]
    arguments = [node.tensor(x) for x in (pool, *rows, *tables, pages)]
    outputs = [(pool.shape, pool.dtype), ((*query.shape[:2], record.y_heads * record.v_head_dim), query.dtype)]
    after, y = node.call_tir(build_linear_attention(record), arguments, outputs, "linear_attention")
    return y, node.reshape_to(after, states.shape)
