"""MultiHeadCacheAttention: append packed requests to their caches, and attend to all cached keys."""

from __future__ import annotations

from ...importing.node import Node
from ...importing.values import Value
from . import ppl_op
from .packed_attention import check_rows, emit_attention
from .ppl_cache import append_to_cache, read_cache
from .ppl_requests import read_requests, require_present
from .table_checks import check_tables


@ppl_op("MultiHeadCacheAttention")
def multi_head_cache_attention(
    node: Node,
    query: Value,
    current_key: Value,
    current_value: Value,
    seqstarts: Value,
    kvstarts: Value,
    cachestarts: Value,
    start_pos: Value,
    decoding_batches: Value,
    max_seqlen: Value,
    max_kvlen: Value,
    cache: Value,
    scale: Value | None = None,
    attn_mask: Value | None = None,
) -> tuple[Value, Value | None, Value | None]:
    """Return Y [N, Hq, D], and cache and scale with the new rows.

    max_seqlen and max_kvlen are redundant with the starts. Without quant_bit a scale is returned unchanged, whatever
    its shape.
    """
    require_present(node, decoding_batches=decoding_batches, max_seqlen=max_seqlen, max_kvlen=max_kvlen)
    heads = node.attr("num_heads"), node.attr("num_kv_heads", 0) or node.attr("num_heads")
    query, key, value = check_rows(
        node, heads, node.attr("head_dim"), query, current_key, current_value, has_own_keys=True
    )
    cache_before = read_cache(node, heads[1], key, seqstarts, cachestarts, cache, scale)
    seqstarts = check_tables(
        node,
        query.shape[0],
        seqstarts,
        kvstarts,
        decoding_batches=decoding_batches,
        cachestarts=cachestarts,
        start_pos=start_pos,
        cache=cache_before,
        attn_mask=attn_mask,
    )
    packed_requests = read_requests(node, query.shape[0], seqstarts, kvstarts, decoding_batches, cache_before.capacity)
    cache_after = append_to_cache(node, cache_before, packed_requests, start_pos, key, value)
    y = emit_attention(node, heads, query, packed_requests, cache_after.layout, cache_after.tensors, attn_mask)
    return y, cache_after.tensors["kv"], cache_after.tensors.get("kv_scale", scale)
