"""MultiHeadAttention: packed requests attend to packed keys and values."""

from __future__ import annotations

from ...attention.record.cache_layout import CacheLayout, Offset
from ...importing.node import Node
from ...importing.values import Value
from . import ppl_op
from .packed_attention import check_rows, emit_attention
from .ppl_requests import read_requests, require_present
from .table_checks import check_tables


@ppl_op("MultiHeadAttention")
def multi_head_attention(
    node: Node,
    query: Value,
    key: Value,
    value: Value,
    seqstarts: Value,
    kvstarts: Value,
    decoding_batches: Value,
    max_seqlen: Value,
    max_kvlen: Value,
    attn_mask: Value | None = None,
) -> Value:
    """Return Y [N, Hq, D], for keys and values [NK, Hkv, D]."""
    require_present(node, decoding_batches=decoding_batches, max_seqlen=max_seqlen, max_kvlen=max_kvlen)
    heads = node.attr("num_heads"), node.attr("num_kv_heads", 0) or node.attr("num_heads")
    query, key, value = check_rows(node, heads, node.attr("head_dim"), query, key, value, has_own_keys=False)
    seqstarts = check_tables(
        node,
        query.shape[0],
        seqstarts,
        kvstarts,
        decoding_batches=decoding_batches,
        keys=key.shape[0],
        attn_mask=attn_mask,
    )
    packed_requests = read_requests(node, query.shape[0], seqstarts, kvstarts, decoding_batches, key.shape[0])
    tensors = {"k": key, "v": value, "slot_starts": packed_requests.key_starts}
    return emit_attention(node, heads, query, packed_requests, CacheLayout("thd", Offset()), tensors, attn_mask)
