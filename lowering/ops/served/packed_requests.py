"""PackedRequests: the rows, keys and blocks of each request, computed once for all layers from the host's tables."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.codegen.parameters import int64
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.checks import SERVED
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..helpers.assertions import assert_requests, assert_shape
from ..helpers.compute import number
from ..helpers.kernels import emit_loops, serial
from .layer_pages import compute_block_entries


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
    """Return int64 tables of a ragged batch, which the operators of all layers share.

    The inputs are ids [1, N], block_table [R, M], kv_cache [blocks, layers, 2, Hkv, tokens, D], state_slots [R] and
    states [slots, ...]. No request has more tokens than attribute context allows and its blocks can store, whatever the
    tables contain.

    Returns:
        positions [N]: the index of each row's token in its request; 0 for rows without a request.
        row_requests [N]: the request of each row; -1 for rows without a request.
        last_rows [R], row_starts [R + 1], first_rows [R], row_counts [R].
        past [R] and lengths [R]: numbers of keys before and after the call.
        maxima [2]: the largest numbers of rows and of keys of a request, at least 1.
        entries [R, 2, M], with a cache: the blocks of keys and values of layer 0, in kv_cache[:, 0] flattened with the
            other layers' blocks; negative if there is no block.
    """
    rows, count, context = ids.shape[1], past_lengths.shape[0], node.attr("context")
    row_starts = assert_shape(node, row_starts, (node.simplify(count + 1),))
    blocks, tokens, slots, room = 0, 0, 0, context
    if block_table is not None and kv_cache is not None:
        blocks, tokens = kv_cache.shape[0], number(node, "dimension 4 of kv_cache", kv_cache.shape[4])
        block_table = assert_shape(node, block_table, (count, block_table.shape[1]))
        room = node.simplify(tirx.min(int64(block_table.shape[1] * tokens), int64(context)))
    if state_slots is not None and states is not None:
        slots, state_slots = states.shape[0], assert_shape(node, state_slots, (count,))
    # The order is that of runtime/native/requests_served.c.
    check_inputs = [row_starts, past_lengths, block_table, state_slots]
    row_starts = assert_requests(node, SERVED, check_inputs, [rows, context, blocks, tokens, slots])
    positions, row_requests, last_rows, *tables = _emit_tables(node, row_starts, past_lengths, rows, room)
    entries = None if block_table is None or kv_cache is None else compute_block_entries(node, block_table, kv_cache)
    return positions, row_requests, last_rows, row_starts, *tables, entries


def _emit_tables(node: Node, row_starts: Value, past_lengths: Value, rows: Size, room: Size) -> tuple[Value, ...]:
    """Emit positions, row_requests, last_rows, first_rows, row_counts, past, lengths and maxima.

    rows is N, and room the number of tokens that a request may have.
    """
    count = past_lengths.shape[0]

    def body(row_starts: Any, past_lengths: Any, *buffers: Any) -> None:
        positions, row_requests, last_rows, first_rows, row_counts, past, lengths, maxima = buffers
        with serial(rows) as n:
            T.buffer_store(positions, int64(0), [n])
            T.buffer_store(row_requests, int64(-1), [n])
        for k in range(2):
            T.buffer_store(maxima, int64(1), [k])
        with serial(count) as r:
            begin, end = (tirx.max(tirx.min(row_starts[index], int64(rows)), int64(0)) for index in (r, r + 1))
            before = T.bind(tirx.max(tirx.min(past_lengths[r], int64(room)), int64(0)))
            new = T.bind(tirx.max(tirx.min(end - begin, int64(room) - before), int64(0)))
            for table, value in (
                (last_rows, tirx.max(end - 1, int64(0))), (first_rows, begin), (row_counts, new), (past, before),
                (lengths, before + new),
            ):  # fmt: skip
                T.buffer_store(table, value, [r])
            for k, value in enumerate((new, before + new)):
                T.buffer_store(maxima, tirx.max(maxima[k], value), [k])
            with T.serial(new) as i:
                T.buffer_store(positions, before + i, [begin + i])
                T.buffer_store(row_requests, r, [begin + i])

    outputs = [(shape, "int64") for shape in ((rows,), (rows,), *((count,),) * 5, (2,))]
    inputs = [row_starts, past_lengths]
    return emit_loops(node, "requests", body, inputs, outputs, [count, rows, room])
