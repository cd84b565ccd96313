"""com.microsoft DecoderMaskedMultiHeadAttention: one new token of each batch, over its cache or over an encoder's keys.

Caches are [B, H, M, D] as onnxruntime's CPU kernel has them, M tokens with room; its CUDA kernel keeps keys in another
order.
"""

from __future__ import annotations

import math

from ...attention.cache_layout import Beams
from ...importing import symbolic
from ...importing.compute import agreed, number
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..asserted import asserted, required
from ..attend import attend, concatenated, heads_first, mask_of
from ..contents import sizes
from ..run_time import bind
from . import DOMAIN
from .masks import Padding, Scores, biased, filter_value, padding
from .projections import bias_parts, check_floats, head_size, part
from .shared_buffer import SharedBuffer, lengths_of, seen, shared_buffer


@op("DecoderMaskedMultiHeadAttention", since=1, domain=DOMAIN)
def decoder_masked_multi_head_attention(
    node: Node,
    query: Value,
    key: Value | None = None,
    value: Value | None = None,
    mask_index: Value | None = None,
    attention_bias: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    past_sequence_length: Value | None = None,
    beam_width: Value | None = None,
    cache_indirection: Value | None = None,
    bias: Value | None = None,
) -> tuple[Value, Value | None, Value | None, Value | None]:
    """Y [B, 1, H * Dv], present_key, present_value [B, H, M, D], and with output_qk the scaled and masked scores
    [B, H, 1, T].

    query is [B, 1, H * D] with key and value of the new token alike, or packed [B, 1, (2 D + Dv) H] without them; or
    key and value are an encoder's, [B, H, T, D], without caches.
    """
    heads, share = node.attr("num_heads"), bool(node.attr("past_present_share_buffer", 0))
    check_floats(node, query=query, key=key, value=value, past_key=past_key, past_value=past_value, bias=bias)
    if query.rank != 3:
        raise node.error(f"input query has rank {query.rank}.", "Make it [batch, 1, hidden].")
    if (past_key is None) != (past_value is None):
        raise node.error("one of past_key and past_value is given.", "Give both or none.")
    for name, cache in (("past_key", past_key), ("past_value", past_value)):
        if cache is not None and cache.rank != 4:
            raise node.error(f"input {name} has rank {cache.rank}.", "Make it [batch, heads, length, head size].")
    given = [x for x in (query, past_key, past_value) if x is not None]
    query = asserted(node, query, (agreed(node, "the batch size", *(x.shape[0] for x in given)), 1, query.shape[2]))
    q, k, v = _projections(node, heads, query, key, value, bias)
    shared: SharedBuffer | None = None
    if k.rank == 4:
        if past_key is not None or past_sequence_length is not None or cache_indirection is not None:
            raise node.error(
                "key is an encoder's [batch, heads, keys, head size], and there is a cache.", "Remove one."
            )
        keys = k.shape[2]
    elif past_key is None or past_value is None:
        raise node.error("past_key and past_value are missing.", "Give them, or keys of an encoder.")
    elif share:
        if past_sequence_length is None:
            raise node.error("past_sequence_length is missing.", "Give it with past_present_share_buffer = 1.")
        caches = past_key, past_value
        shared = shared_buffer(node, heads, (k, v), caches, past_sequence_length, cache_indirection)
        k, v, keys = shared.k, shared.v, shared.total
    else:
        if cache_indirection is not None:
            raise node.error("cache_indirection is given.", "It goes with past_present_share_buffer = 1.")
        k, v = (_grown(node, heads, cache, new) for cache, new in ((past_key, k), (past_value, v)))
        k, v = (asserted(node, x, (*x.shape[:2], k.shape[2], x.shape[3])) for x in (k, v))
        keys = k.shape[2]
    q = _with_beams(node, q, beam_width, None if shared is None else shared.beams)
    scores = Scores(q.shape[0], heads, 1, keys, filter_value(node))
    mask = Padding()
    if mask_index is not None:
        if mask_index.rank != 2:
            raise node.error(f"input mask_index has rank {mask_index.rank}.", "Make it [batch, keys].")
        mask = padding(node, "mask_index", mask_index, scores)
    added = biased(node, scores, attention_bias, mask.bias)
    results = attend(
        node,
        {"q": q, "k": k, "v": v, "mask": added, **lengths_of(node, shared, mask)},
        heads=(heads, heads),
        beams=None if shared is None else shared.beams,
        acc_dtype="float64" if q.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(q.shape[2] // heads),
        mask=mask_of(added, pad=shared is not None),
        qk_mode=2 if node.wants(3) else None,
    )
    qk = results.get("qk")
    qk = seen(node, qk, keys) if shared is not None and qk is not None else qk
    if node.wants(3) and not node.attr("output_qk", 0):
        raise node.error("output qk is named, and attribute output_qk is 0.", "Set it to 1, or drop the output.")
    return results["y"], k if node.wants(1) else None, v if node.wants(2) else None, qk


def _projections(
    node: Node, heads: int, query: Value, key: Value | None, value: Value | None, bias: Value | None
) -> tuple[Value, Value, Value]:
    """Q [B, 1, H * D], and K and V likewise or [B, H, T, D], with the bias added to what is no cache."""
    batch, _, width = query.shape
    ranks = tuple(0 if x is None else x.rank for x in (key, value))
    if ranks == (0, 0):
        total = number(node, "last dimension of query", width)
        # Without a cache of values whose size tells, all three are equally wide.
        width = heads * head_size(node, "packed query", total, 3 * heads)
        biases = bias_parts(node, bias, (width,) * 3)
        q, k, v = (part(node, query, n * width, width, biases[n]) for n in range(3))
        return q, k, v
    if ranks not in ((3, 3), (4, 4)) or key is None or value is None:
        raise node.error(f"inputs key and value have ranks {ranks}.", "Make them [batch, 1, hidden] or of rank 4.")
    width = heads * head_size(node, "query", width, heads)
    batch = agreed(node, "the batch size", batch, key.shape[0], value.shape[0])
    query = asserted(node, query, (batch, 1, width))
    if ranks == (4, 4):
        size = number(node, "head size of value", value.shape[3])
        length = agreed(node, "the number of keys and values", key.shape[2], value.shape[2])
        biases = bias_parts(node, bias, (width, width, heads * size))
        k = asserted(node, key, (batch, heads, length, width // heads))
        return part(node, query, 0, width, biases[0]), k, asserted(node, value, (batch, heads, length, size))
    v_width = heads * head_size(node, "value", value.shape[2], heads)
    biases = bias_parts(node, bias, (width, width, v_width))
    q = part(node, query, 0, width, biases[0])
    k = part(node, asserted(node, key, (batch, 1, width)), 0, width, biases[1])
    return q, k, part(node, asserted(node, value, (batch, 1, v_width)), 0, v_width, biases[2])


def _grown(node: Node, heads: int, cache: Value, new: Value) -> Value:
    cache = asserted(node, cache, (new.shape[0], heads, cache.shape[2], new.shape[2] // heads))
    return concatenated(node, cache, heads_first(node, new, heads))


def _with_beams(node: Node, q: Value, beam_width: Value | None, beams: Beams | None) -> Value:
    """q, where beam_width says what cache_indirection does; 1 without it."""
    if beam_width is None:
        return q
    known = sizes(beam_width)
    count: Size = known[0] if known is not None else bind(node, node.reshaped(beam_width, (1,)))[0]
    wanted = 1 if beams is None else beams.count
    text = f"beam_width is {{}}, and cache_indirection has {wanted} beams."
    if beams is None:
        text = "beam_width is {}, and there is no cache_indirection."
    return required(node, q, symbolic.equal(count, wanted), text, count)
