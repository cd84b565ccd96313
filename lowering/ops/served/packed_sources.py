"""PackedSources: the lengths and blocks of each request's source, computed once for all layers."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ...attention.codegen.parameters import int64
from ...graph.loading.legality import OWN_DOMAIN
from ...importing.checks import SOURCES
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.assertions import assert_requests, assert_shape
from ..helpers.compute import number
from ..helpers.kernels import emit_loops, serial
from .layer_pages import compute_block_entries


@op("PackedSources", since=1, domain=OWN_DOMAIN)
def packed_sources(
    node: Node,
    source_lengths: Value,
    source_table: Value,
    source_cache: Value,
    request_maxima: Value | None = None,
) -> tuple[Value, Value, Value]:
    """Return the int64 tables lengths, maxima and entries of the sources.

    The inputs are source_lengths [R], source_table [R, M] and source_cache [blocks, layers, 2, Hkv, tokens, D].

    Returns:
        lengths [R]: numbers of keys, at most what the blocks of a request store, whatever the tables contain.
        maxima [2]: the largest number of rows of a request, which is that of the input `most`, or 1 if the blocks are
            to be written; and the largest number of keys of a source, at least 1.
        entries [R, 2, M]: as those of PackedRequests.
    """
    count, columns = source_lengths.shape[0], source_table.shape[1]
    blocks, tokens = source_cache.shape[0], number(node, "dimension 4 of source_cache", source_cache.shape[4])
    source_table = assert_shape(node, source_table, (count, columns))
    tables = [source_lengths, source_table]
    # The order is that of runtime/native/requests_served.c.
    source_lengths = assert_requests(node, SOURCES, tables, [blocks, tokens, int(request_maxima is None)])
    room = node.simplify(tirx.min(int64(columns * tokens), int64(LARGEST_SIZE)))

    def body(source_lengths: Any, *buffers: Any) -> None:
        *row_inputs, lengths, maxima = buffers
        T.buffer_store(maxima, row_inputs[0][0] if row_inputs else int64(1), [0])
        T.buffer_store(maxima, int64(1), [1])
        with serial(count) as r:
            length = T.bind(tirx.max(tirx.min(source_lengths[r], int64(room)), int64(0)))
            T.buffer_store(lengths, length, [r])
            T.buffer_store(maxima, tirx.max(maxima[1], length), [1])

    inputs = [source_lengths] if request_maxima is None else [source_lengths, request_maxima]
    lengths, maxima = emit_loops(node, "sources", body, inputs, [((count,), "int64"), ((2,), "int64")], [count, room])
    return lengths, maxima, compute_block_entries(node, source_table, source_cache)
