"""ServedLinearAttention: linear attention of packed requests, each of which goes on from a state of its own."""

from __future__ import annotations

from dataclasses import replace

from ...attention.linear import copying
from ...graph.legality import OWN_DOMAIN
from ...importing.node import Node
from ...importing.values import Value, static
from .. import op
from ..asserted import asserted
from ..linear_attention import FLOATS, Rows, read_problem
from ..microsoft.linear_attention import head_counts
from .layer_states import layer_states


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
    """output [1, N, heads Dv], and the pool with the states of layer `layer` behind the new tokens.

    query, key, value, decay, beta [1, N, ...] and the attributes are com.microsoft LinearAttention's; the tables [R]
    are those of PackedRequests. states [slots, layers, kv_num_heads, D, Dv]: request r has slot state_slots[r], whose
    state counts as zeros where past[r] is 0.
    """
    q_heads, kv_heads = head_counts(node)
    record, rows = read_problem(node, Rows(query, key, value, decay, beta), q_heads, kv_heads, shared_keys=True)
    shape = (*states.shape[:2], kv_heads, record.head_dim, record.v_head_dim)
    if states.rank != 5 or states.dtype not in FLOATS:
        raise node.error(
            f"input states is {states.dtype} of rank {states.rank}.",
            "Make it floats [slots, layers, kv_num_heads, D, Dv].",
        )
    pool, pages = layer_states(node, state_slots, asserted(node, states, shape), past)
    record = replace(record, batch=static(past.shape[0]), state_dtype=states.dtype, packed=True)
    tables = [asserted(node, table, past.shape) for table in (first_rows, row_counts, past)]
    arguments = [node.tensor(x) for x in (pool, *rows, *tables, pages)]
    outputs = [(pool.shape, pool.dtype), ((*query.shape[:2], record.y_heads * record.v_head_dim), query.dtype)]
    after, y = node.call_tir(copying(record), arguments, outputs, "linear_attention")
    return y, node.reshaped(after, states.shape)
