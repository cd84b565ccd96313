"""MultiHeadCacheAttention: packed requests append to their caches, and attend to all that is there."""

from __future__ import annotations

from ...importing.node import Node
from ...importing.values import Value
from . import ppl_op
from .attended import attended, rows
from .cache import cache_of, updated
from .legal import legal
from .requests import present, requests


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
    """Y [N, Hq, D], and cache and scale with the new rows. max_seqlen and max_kvlen say what the starts say, too.

    Without quant_bit a scale is left alone, whatever its shape."""
    present(node, decoding_batches=decoding_batches, max_seqlen=max_seqlen, max_kvlen=max_kvlen)
    heads = node.attr("num_heads"), node.attr("num_kv_heads", 0) or node.attr("num_heads")
    query, key, value = rows(node, heads, node.attr("head_dim"), query, current_key, current_value, own=True)
    before = cache_of(node, heads[1], key, seqstarts, cachestarts, cache, scale)
    seqstarts = legal(
        node,
        query.shape[0],
        seqstarts,
        kvstarts,
        decoding_batches=decoding_batches,
        cachestarts=cachestarts,
        start_pos=start_pos,
        cache=before,
        attn_mask=attn_mask,
    )
    batch = requests(node, query.shape[0], seqstarts, kvstarts, decoding_batches, before.capacity)
    after = updated(node, before, batch, start_pos, key, value)
    y = attended(node, heads, query, batch, after.layout, after.tensors, attn_mask)
    return y, after.tensors["kv"], after.tensors.get("kv_scale", scale)
