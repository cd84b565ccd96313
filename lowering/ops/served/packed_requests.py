"""PackedRequests: where the rows, keys and blocks of each request are, of tables that a host has made; once for all
layers."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.parameters import int64
from ...graph.legality import OWN_DOMAIN
from ...importing.checks import SERVED
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..asserted import asserted, legal_requests
from ..kernels import loops, serial
from .layer_pages import block_entries


@op("PackedRequests", since=1, domain=OWN_DOMAIN)
def packed_requests(
    node: Node,
    ids: Value,
    row_starts: Value,
    past_lengths: Value,
    block_table: Value | None = None,
    kv_cache: Value | None = None,
    state_slots: Value | None = None,
    states: Value | None = None,
) -> tuple[Value | None, ...]:
    """For ids [1, N], block_table [R, M], kv_cache [blocks, layers, 2, Hkv, tokens, D], state_slots [R] and states
    [slots, ...], int64:

    positions [N], which token of its request each row is, and row_requests [N], whose it is, 0 and -1 for rows of no
    request; last_rows [R]; row_starts [R + 1]; first_rows and row_counts [R]; past and lengths [R], of keys; most [2],
    the most rows and keys of a request, at least 1; and, where there is a cache, entries [R, 2, M], where layer 0 has
    its blocks of keys and values in kv_cache[:, 0] flattened with the other layers', negative for none.

    No request has more tokens than attribute context says and its blocks hold, whatever the tables say.
    """
    rows, count, context = ids.shape[1], past_lengths.shape[0], node.attr("context")
    row_starts = asserted(node, row_starts, (node.simplify(count + 1),))
    blocks, tokens, slots, room = 0, 0, 0, context
    if block_table is not None and kv_cache is not None:
        blocks, tokens = kv_cache.shape[0], number(node, "dimension 4 of kv_cache", kv_cache.shape[4])
        block_table = asserted(node, block_table, (count, block_table.shape[1]))
        room = node.simplify(tirx.min(int64(block_table.shape[1] * tokens), int64(context)))
    if state_slots is not None and states is not None:
        slots, state_slots = states.shape[0], asserted(node, state_slots, (count,))
    # In the order of runtime/requests_served.c.
    tables = [row_starts, past_lengths, block_table, state_slots]
    row_starts = legal_requests(node, SERVED, tables, [rows, context, blocks, tokens, slots])

    def body(row_starts: Any, past_lengths: Any, *made: Any) -> None:
        positions, row_requests, last_rows, first_rows, row_counts, past, lengths, most = made
        with serial(rows) as n:
            T.buffer_store(positions, int64(0), [n])
            T.buffer_store(row_requests, int64(-1), [n])
        for k in range(2):
            T.buffer_store(most, int64(1), [k])
        with serial(count) as r:
            begin, end = (tirx.max(tirx.min(row_starts[at], int64(rows)), int64(0)) for at in (r, r + 1))
            before = T.bind(tirx.max(tirx.min(past_lengths[r], int64(room)), int64(0)))
            new = T.bind(tirx.max(tirx.min(end - begin, int64(room) - before), int64(0)))
            for table, value in (
                (last_rows, tirx.max(end - 1, int64(0))), (first_rows, begin), (row_counts, new), (past, before),
                (lengths, before + new),
            ):  # fmt: skip
                T.buffer_store(table, value, [r])
            for k, value in enumerate((new, before + new)):
                T.buffer_store(most, tirx.max(most[k], value), [k])
            with T.serial(new) as i:
                T.buffer_store(positions, before + i, [begin + i])
                T.buffer_store(row_requests, r, [begin + i])

    outputs = [(shape, "int64") for shape in ((rows,), (rows,), *((count,),) * 5, (2,))]
    given = [row_starts, past_lengths]
    positions, row_requests, last_rows, *others = loops(node, "requests", body, given, outputs, [count, rows, room])
    entries = None if block_table is None or kv_cache is None else block_entries(node, block_table, kv_cache)
    return positions, row_requests, last_rows, row_starts, *others, entries
