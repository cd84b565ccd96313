"""Whether the tables of packed requests fit each other, the rows and the cache: a check of the run."""

from __future__ import annotations

from ...attention.cache_layout import Pages
from ...importing.checks import OPENPPL
from ...importing.node import Node
from ...importing.values import Size, Value
from ..asserted import legal_requests
from .cache import Cache


def legal(
    node: Node,
    rows: Size,
    seqstarts: Value,
    kvstarts: Value,
    *,
    decoding_batches: Value | None = None,
    keys: Size = -1,
    cachestarts: Value | None = None,
    start_pos: Value | None = None,
    cache: Cache | None = None,
    attn_mask: Value | None = None,
) -> Value:
    """seqstarts, of requests with so many packed rows, behind the check of all tables. keys is the number of packed
    keys, where there are such; a cache goes with cachestarts and start_pos."""
    slots, page, columns = -1, 0, -1
    if cache is not None:
        slots = cache.tensors["kv"].shape[cache.layout.axes.index("t")]
        page = cache.layout.slots.size or 0 if isinstance(cache.layout.slots, Pages) else 0
    if attn_mask is not None and attn_mask.rank > 1:
        columns = attn_mask.shape[-1]
    # In the order of runtime/requests_openppl.c.
    tables = [seqstarts, kvstarts, cachestarts, start_pos, decoding_batches]
    return legal_requests(node, OPENPPL, tables, [rows, keys, slots, page, columns])
