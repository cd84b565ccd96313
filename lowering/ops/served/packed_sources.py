"""PackedSources: how many rows the source of each request has and in which blocks they are; once for all layers."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...arithmetic import LARGEST_SIZE
from ...attention.parameters import int64
from ...graph.legality import OWN_DOMAIN
from ...importing.checks import SOURCES
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..asserted import asserted, legal_requests
from ..kernels import loops, serial
from .layer_pages import block_entries


@op("PackedSources", since=1, domain=OWN_DOMAIN)
def packed_sources(
    node: Node, source_lengths: Value, source_table: Value, source_cache: Value, most: Value | None = None
) -> tuple[Value, Value, Value]:
    """For source_lengths [R], source_table [R, M] and source_cache [blocks, layers, 2, Hkv, tokens, D], int64:

    lengths [R], of keys, no more than the blocks of a request hold, whatever the tables say; most [2], the most rows of
    a request, which are those of the input `most`, or 1 where the blocks are to be written, and the most keys of a
    source, at least 1; entries [R, 2, M], as those of PackedRequests.
    """
    count, columns = source_lengths.shape[0], source_table.shape[1]
    blocks, tokens = source_cache.shape[0], number(node, "dimension 4 of source_cache", source_cache.shape[4])
    source_table = asserted(node, source_table, (count, columns))
    tables = [source_lengths, source_table]
    # In the order of runtime/requests_served.c.
    source_lengths = legal_requests(node, SOURCES, tables, [blocks, tokens, int(most is None)])
    room = node.simplify(tirx.min(int64(columns * tokens), int64(LARGEST_SIZE)))

    def body(source_lengths: Any, *made: Any) -> None:
        *rows, lengths, longest = made
        T.buffer_store(longest, rows[0][0] if rows else int64(1), [0])
        T.buffer_store(longest, int64(1), [1])
        with serial(count) as r:
            length = T.bind(tirx.max(tirx.min(source_lengths[r], int64(room)), int64(0)))
            T.buffer_store(lengths, length, [r])
            T.buffer_store(longest, tirx.max(longest[1], length), [1])

    given = [source_lengths] if most is None else [source_lengths, most]
    lengths, longest = loops(node, "sources", body, given, [((count,), "int64"), ((2,), "int64")], [count, room])
    return lengths, longest, block_entries(node, source_table, source_cache)
