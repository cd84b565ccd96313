"""A run-time check that the tables of packed requests fit each other, the rows and the cache."""

from __future__ import annotations

from ...attention.record.cache_layout import Pages
from ...importing.checks import OPENPPL
from ...importing.node import Node
from ...importing.values import Size, Value
from ..helpers.assertions import assert_requests
from .ppl_cache import PplCache


def check_tables(
    node: Node,
    rows: Size,
    seqstarts: Value,
    kvstarts: Value,
    *,
    decoding_batches: Value | None = None,
    keys: Size = -1,
    cachestarts: Value | None = None,
    start_pos: Value | None = None,
    cache: PplCache | None = None,
    attn_mask: Value | None = None,
) -> Value:
    """Return seqstarts with a check of all tables attached.

    `rows` is the number of packed rows. keys is the number of packed keys, or -1 if keys are in a cache. A cache needs
    cachestarts and start_pos.
    """
    slots, page, columns = -1, 0, -1
    if cache is not None:
        slots = cache.tensors["kv"].shape[cache.layout.axes.index("t")]
        page = cache.layout.slots.size or 0 if isinstance(cache.layout.slots, Pages) else 0
    if attn_mask is not None and attn_mask.rank > 1:
        columns = attn_mask.shape[-1]
    # The order is that of runtime/native/requests_openppl.c.
    tables = [seqstarts, kvstarts, cachestarts, start_pos, decoding_batches]
    return assert_requests(node, OPENPPL, tables, [rows, keys, slots, page, columns])
