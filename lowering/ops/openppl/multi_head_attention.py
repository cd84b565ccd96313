"""MultiHeadAttention: packed requests attend to packed keys and values."""

from __future__ import annotations

from ...attention.cache_layout import CacheLayout, Offset
from ...importing.node import Node
from ...importing.values import Value
from . import ppl_op
from .attended import attended, rows
from .legal import legal
from .requests import present, requests


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
    """Y [N, Hq, D], for keys and values [NK, Hkv, D]."""
    present(node, decoding_batches=decoding_batches, max_seqlen=max_seqlen, max_kvlen=max_kvlen)
    heads = node.attr("num_heads"), node.attr("num_kv_heads", 0) or node.attr("num_heads")
    query, key, value = rows(node, heads, node.attr("head_dim"), query, key, value, own=False)
    seqstarts = legal(
        node,
        query.shape[0],
        seqstarts,
        kvstarts,
        decoding_batches=decoding_batches,
        keys=key.shape[0],
        attn_mask=attn_mask,
    )
    batch = requests(node, query.shape[0], seqstarts, kvstarts, decoding_batches, key.shape[0])
    tensors = {"k": key, "v": value, "slot_starts": batch.key_starts}
    return attended(node, heads, query, batch, CacheLayout("thd", Offset()), tensors, attn_mask)
