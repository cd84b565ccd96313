"""com.microsoft DecoderMaskedMultiHeadAttention: one new token of each batch, over its cache or an encoder's keys.

Caches are [B, H, M, D], with room for M tokens, as in onnxruntime's CPU kernel; its CUDA kernel stores keys in another
order.
"""

from __future__ import annotations

import math

from ....attention.record.cache_layout import Beams
from ....importing.node import Node
from ....importing.values import Size, Value
from ... import op
from ...attention.attend import concatenate_cache, describe_mask, lower_attention, move_heads_first
from ...helpers import symbolic
from ...helpers.assertions import assert_shape, require
from ...helpers.compute import number, unify_sizes
from ...helpers.contents import read_sizes
from ...helpers.requirements import require_input, require_rank
from ...helpers.run_time import bind_sizes
from .. import DOMAIN
from .masks import PaddingMask, ScoreMatrix, add_biases, read_filter_value, read_padding
from .projections import check_cache_ranks, check_floats, check_pair, divide_heads, slice_projection, split_bias
from .shared_buffer import SharedBuffer, append_to_shared_buffer, combine_lengths, trim_scores


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
    """Return Y [B, 1, H * Dv], the caches, and with output_qk the scaled and masked scores [B, H, 1, T].

    present_key and present_value are [B, H, M, D]. query is [B, 1, H * D] with key and value of the new token in the
    same layout, or packed [B, 1, (2 D + Dv) H] without them. Otherwise key and value are an encoder's, [B, H, T, D],
    without caches.
    """
    heads, has_shared_buffer = node.attr("num_heads"), bool(node.attr("past_present_share_buffer", 0))
    check_floats(node, query=query, key=key, value=value, past_key=past_key, past_value=past_value, bias=bias)
    require_rank(node, "query", query, "[batch, 1, hidden]")
    check_pair(node, past_key=past_key, past_value=past_value)
    check_cache_ranks(node, past_key, past_value)
    batched_inputs = [x for x in (query, past_key, past_value) if x is not None]
    query = assert_shape(
        node, query, (unify_sizes(node, "the batch size", *(x.shape[0] for x in batched_inputs)), 1, query.shape[2])
    )
    q, k, v = _split_projections(node, heads, query, key, value, bias)
    k, v, keys, shared = _append_new_tokens(
        node, heads, (k, v), (past_key, past_value), past_sequence_length, cache_indirection, has_shared_buffer
    )
    q = _check_beam_width(node, q, beam_width, None if shared is None else shared.beams)
    scores = ScoreMatrix(q.shape[0], heads, 1, keys, read_filter_value(node))
    mask = PaddingMask() if mask_index is None else _read_mask(node, mask_index, scores)
    attention_mask = add_biases(node, scores, attention_bias, mask.bias)
    results = lower_attention(
        node,
        {"q": q, "k": k, "v": v, "mask": attention_mask, **combine_lengths(node, shared, mask)},
        heads=(heads, heads),
        beams=None if shared is None else shared.beams,
        acc_dtype="float64" if q.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(q.shape[2] // heads),
        mask=describe_mask(attention_mask, pad=shared is not None),
        qk_mode=2 if node.has_output(3) else None,
    )
    qk = results.get("qk")
    qk = trim_scores(node, qk, keys) if shared is not None and qk is not None else qk
    if node.has_output(3) and not node.attr("output_qk", 0):
        raise node.error(
            "node.output_unsupported",
            "output qk is present, and attribute output_qk is 0.",
            "Set it to 1, or remove the output.",
        )
    return results["y"], k if node.has_output(1) else None, v if node.has_output(2) else None, qk


def _split_projections(
    node: Node, heads: int, query: Value, key: Value | None, value: Value | None, bias: Value | None
) -> tuple[Value, Value, Value]:
    """Return Q [B, 1, H * D], and K and V in the same layout or [B, H, T, D].

    The bias is added to projections, and not to caches.
    """
    batch, _, width = query.shape
    ranks = tuple(0 if x is None else x.rank for x in (key, value))
    if ranks == (0, 0):
        total = number(node, "last dimension of query", width)
        # All three are equally wide, since there is no cache of values that gives another size.
        width = heads * divide_heads(node, "packed query", total, 3 * heads)
        biases = split_bias(node, bias, (width,) * 3)
        q, k, v = (slice_projection(node, query, n * width, width, biases[n]) for n in range(3))
        return q, k, v
    if ranks not in ((3, 3), (4, 4)) or key is None or value is None:
        raise node.error(
            "node.rank_unsupported",
            f"inputs key and value have ranks {ranks}.",
            "Make them [batch, 1, hidden] or of rank 4.",
        )
    width = heads * divide_heads(node, "query", width, heads)
    batch = unify_sizes(node, "the batch size", batch, key.shape[0], value.shape[0])
    query = assert_shape(node, query, (batch, 1, width))
    if ranks == (4, 4):
        size = number(node, "head size of value", value.shape[3])
        length = unify_sizes(node, "the number of keys and values", key.shape[2], value.shape[2])
        biases = split_bias(node, bias, (width, width, heads * size))
        k = assert_shape(node, key, (batch, heads, length, width // heads))
        return (
            slice_projection(node, query, 0, width, biases[0]),
            k,
            assert_shape(node, value, (batch, heads, length, size)),
        )
    v_width = heads * divide_heads(node, "value", value.shape[2], heads)
    biases = split_bias(node, bias, (width, width, v_width))
    q = slice_projection(node, query, 0, width, biases[0])
    k = slice_projection(node, assert_shape(node, key, (batch, 1, width)), 0, width, biases[1])
    return q, k, slice_projection(node, assert_shape(node, value, (batch, 1, v_width)), 0, v_width, biases[2])


def _append_new_tokens(
    node: Node,
    heads: int,
    new: tuple[Value, Value],
    caches: tuple[Value | None, Value | None],
    past_sequence_length: Value | None,
    cache_indirection: Value | None,
    has_shared_buffer: bool,
) -> tuple[Value, Value, Size, SharedBuffer | None]:
    """Return all keys and values [B, H, T, D], their number, and the caches with room.

    The keys and values of an encoder are returned as they are.
    """
    (k, v), (past_key, past_value) = new, caches
    if k.rank == 4:
        if past_key is not None or past_sequence_length is not None or cache_indirection is not None:
            raise node.error(
                "node.conflicting_inputs",
                "key is an encoder's [batch, heads, keys, head size], and there is a cache.",
                "Remove one of them.",
            )
        return k, v, k.shape[2], None
    if past_key is None or past_value is None:
        raise node.error(
            "node.input_missing", "past_key and past_value are missing.", "Give them, or keys of an encoder."
        )
    if has_shared_buffer:
        remedy = "Give it with past_present_share_buffer = 1."
        past_sequence_length = require_input(node, "past_sequence_length", past_sequence_length, remedy)
        shared = append_to_shared_buffer(
            node, heads, new, (past_key, past_value), past_sequence_length, cache_indirection
        )
        return shared.k, shared.v, shared.total, shared
    if cache_indirection is not None:
        raise node.error(
            "node.conflicting_inputs",
            "cache_indirection is given, and past_present_share_buffer is 0.",
            "Set it to 1, or remove cache_indirection.",
        )
    k, v = (_append_to_cache(node, heads, cache, x) for cache, x in ((past_key, k), (past_value, v)))
    k, v = (assert_shape(node, x, (*x.shape[:2], k.shape[2], x.shape[3])) for x in (k, v))
    return k, v, k.shape[2], None


def _read_mask(node: Node, mask_index: Value, scores: ScoreMatrix) -> PaddingMask:
    """Return the mask of mask_index [B, T]."""
    require_rank(node, "mask_index", mask_index, "[batch, keys]")
    return read_padding(node, "mask_index", mask_index, scores)


def _append_to_cache(node: Node, heads: int, cache: Value, new: Value) -> Value:
    """Return the cache [B, H, P, D] with the new rows [B, 1, H * D] after its own."""
    cache = assert_shape(node, cache, (new.shape[0], heads, cache.shape[2], new.shape[2] // heads))
    return concatenate_cache(node, cache, move_heads_first(node, new, heads))


def _check_beam_width(node: Node, q: Value, beam_width: Value | None, beams: Beams | None) -> Value:
    """Return q, after checking that beam_width is that of cache_indirection, or 1 without it."""
    if beam_width is None:
        return q
    static_sizes = read_sizes(beam_width)
    count: Size = (
        static_sizes[0] if static_sizes is not None else bind_sizes(node, node.reshape_to(beam_width, (1,)))[0]
    )
    expected = 1 if beams is None else beams.count
    text = f"beam_width is {{}}, and cache_indirection has {expected} beams."
    if beams is None:
        text = "beam_width is {}, and there is no cache_indirection."
    return require(node, q, symbolic.equal(count, expected), "node.beam_width_mismatch", text, count)
