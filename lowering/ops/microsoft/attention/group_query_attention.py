"""com.microsoft GroupQueryAttention: rotary embedding, cache update and causal attention of a decoder in one operator.

Batch b has n = seqlens_k[b] + 1 valid tokens after this call. Its S new tokens start at position max(n - S, 0), which
is 0 in a first prompt. That prompt may be padded on the right; results of rows from n on are undefined. A cache with
room for more than total_sequence_length tokens keeps its length, any other one grows to that length.
"""

from __future__ import annotations

import math

import numpy as np

from ....attention.record.problem import Window
from ....importing.node import Node
from ....importing.values import Size, Value, is_one
from ... import op
from ...attention.attend import describe_mask, lower_attention, move_heads_first
from ...attention.rotary_embedding import RotatedHead, rotate_heads
from ...helpers.assertions import assert_shape
from ...helpers.compute import number, unify_sizes
from ...helpers.requirements import reject_attribute, reject_input, require_head_groups, require_input, require_rank
from .. import DOMAIN
from .new_tokens import NewTokens
from .projections import (
    check_cache_ranks,
    check_floats,
    check_pair,
    divide_heads,
    normalize_heads,
    read_head_sink,
    slice_projection,
)
from .quantized_caches import CacheQuantization, check_cache_width, read_cache_quantization, reject_quantization


@op("GroupQueryAttention", since=1, domain=DOMAIN)
def group_query_attention(
    node: Node,
    query: Value,
    key: Value | None,
    value: Value | None,
    past_key: Value | None,
    past_value: Value | None,
    seqlens_k: Value,
    total_sequence_length: Value,
    cos_cache: Value | None = None,
    sin_cache: Value | None = None,
    position_ids: Value | None = None,
    attention_bias: Value | None = None,
    head_sink: Value | None = None,
    k_scale: Value | None = None,
    v_scale: Value | None = None,
    q_norm_weight: Value | None = None,
    k_norm_weight: Value | None = None,
    query_seqlens: Value | None = None,
) -> tuple[Value, Value | None, Value | None]:
    """Return Y [B, S, Hq * D], present_key and present_value [B, Hkv, T, D].

    query is [B, S, Hq * D] with key and value [B, S, Hkv * D], or packed [B, S, (Hq + 2 Hkv) * D] without them. Caches
    may be quantized with k_scale and v_scale (quantized_caches.py); new tokens are then read from them, too, after
    quantization.
    """
    _reject_unsupported(node, query_seqlens)
    check_pair(node, past_key=past_key, past_value=past_value)
    check_floats(node, query=query, key=key, value=value, attention_bias=attention_bias)
    heads = node.attr("num_heads"), node.attr("kv_num_heads")
    q, k, v = _split_projections(node, heads, query, key, value)
    size, rows = q.shape[2] // heads[0], q.shape[1]
    q = normalize_heads(node, q, heads[0], q_norm_weight, "q_norm_epsilon")
    k = normalize_heads(node, k, heads[1], k_norm_weight, "k_norm_epsilon")
    new = NewTokens(node, seqlens_k, total_sequence_length, q)
    if node.attr("do_rotary", 0):
        q, k = _rotate_heads(node, size, (q, k), (cos_cache, sin_cache), new, position_ids)
    if past_key is not None and past_value is not None:
        quantization, k, v = _append_to_caches(node, heads, new, (q, k, v), (past_key, past_value), (k_scale, v_scale))
    else:
        reject_quantization(node, k_scale, v_scale)
        quantization, k, v = CacheQuantization(None, {}, {}), *_make_presents(node, heads[1], k, v)
    check_cache_width(node, quantization.format)
    mask, is_causal = None, bool(node.attr("causal", 1))
    if attention_bias is not None:
        mask = _check_bias(node, attention_bias, (q.shape[0], heads[0], rows))
    sink, lengths = _read_sink(node, heads[0], head_sink, q.dtype), new.compute_lengths(at_least_rows=is_causal)
    results = lower_attention(
        node,
        {"q": q, "k": k, "v": v, "mask": mask, "sink": sink, "lengths": lengths, **quantization.scales},
        heads=heads,
        quantization=quantization.format,
        acc_dtype="float64" if q.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(size),
        softcap=node.attr("softcap", 0.0),
        window=_read_window(node, is_causal),
        mask=describe_mask(mask, pad=True),
    )
    return results["y"], k if node.has_output(1) else None, v if node.has_output(2) else None


def _reject_unsupported(node: Node, query_seqlens: Value | None) -> None:
    for name, remedy in (
        ("sliding_window_cache", "Use a cache of all tokens; local_window_size still skips the old ones."),
        ("qk_output", "Remove the output: the scores are never materialized."),
    ):
        reject_attribute(node, name, 0, remedy)
    reject_input(node, "query_seqlens", query_seqlens, "Remove it and the padding: without it, all rows are tokens.")


def _split_projections(
    node: Node, heads: tuple[int, int], query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value]:
    require_head_groups(node, *heads, code="group_query_attention.heads_not_divisible")
    for name, x in (("query", query), ("key", key), ("value", value)):
        require_rank(node, name, x, "[batch, sequence, hidden]")
    if key is None or value is None:
        check_pair(node, key=key, value=value)
        size = divide_heads(node, "packed query", query.shape[2], heads[0] + 2 * heads[1])
        widths = [count * size for count in (heads[0], heads[1], heads[1])]
        q, k, v = (slice_projection(node, query, sum(widths[:n]), widths[n]) for n in range(3))
        return q, k, v
    size = divide_heads(node, "query", query.shape[2], heads[0])
    batch = unify_sizes(node, "the batch size", *(x.shape[0] for x in (query, key, value)))
    rows = unify_sizes(node, "the sequence length", *(x.shape[1] for x in (query, key, value)))
    for name, x in (("key", key), ("value", value)):
        unify_sizes(node, f"the last dimension of {name}", x.shape[2], heads[1] * size)
    q = assert_shape(node, query, (batch, rows, heads[0] * size))
    k, v = (assert_shape(node, x, (batch, rows, heads[1] * size)) for x in (key, value))
    return q, k, v


def _is_interleaved(node: Node) -> bool:
    return bool(node.attr("rotary_interleaved", 0))


def _rotate_heads(
    node: Node,
    size: int,
    rows: tuple[Value, Value],
    angles: tuple[Value | None, Value | None],
    new: NewTokens,
    position_ids: Value | None,
) -> tuple[Value, Value]:
    """Return Q and K with heads of this size rotated by their positions.

    angles are cos_cache and sin_cache.
    """
    cos_cache, sin_cache = angles
    remedy = "Give it, as do_rotary = 1 requires."
    cos_cache = require_input(node, "cos_cache", cos_cache, remedy)
    sin_cache = require_input(node, "sin_cache", sin_cache, remedy)
    head = RotatedHead(size, 2 * number(node, "last dimension of cos_cache", cos_cache.shape[1]), _is_interleaved(node))
    if head.rotated > size:
        raise node.error(
            "node.angles_exceed_head",
            f"cos_cache has {head.rotated // 2} angles, for heads of {size} elements.",
            "Give at most half as many.",
        )
    positions = new.compute_positions(position_ids)
    q, k = (rotate_heads(node, head, x, cos_cache, sin_cache, positions) for x in rows)
    return q, k


def _make_presents(node: Node, kv_heads: int, k: Value, v: Value) -> tuple[Value, Value]:
    """Return K and V of a node without caches, as present_key and present_value if these are outputs."""
    if not node.has_output(1) and not node.has_output(2):
        return k, v
    return move_heads_first(node, k, kv_heads), move_heads_first(node, v, kv_heads)


def _append_to_caches(
    node: Node,
    heads: tuple[int, int],
    new: NewTokens,
    rows: tuple[Value, Value, Value],
    pasts: tuple[Value, Value],
    scales: tuple[Value | None, Value | None],
) -> tuple[CacheQuantization, Value, Value]:
    """Return the quantization of the caches, and the caches [B, Hkv, T, D] with the new K and V.

    rows are Q, K and V, and scales those of the caches.
    """
    (q, k, v), (past_key, past_value), (k_scale, v_scale) = rows, pasts, scales
    size = q.shape[2] // heads[0]
    check_cache_ranks(node, past_key, past_value)
    length = unify_sizes(node, "the length of past_key and past_value", past_key.shape[2], past_value.shape[2])
    unify_sizes(node, "the number of heads of the caches", heads[1], past_key.shape[1], past_value.shape[1])
    quantization = read_cache_quantization(
        node, (heads[1], size), q.dtype, (("k", past_key, k_scale), ("v", past_value, v_scale))
    )
    cache_shape = (
        q.shape[0],
        heads[1],
        length,
        size // (quantization.format.packing if quantization.format is not None else 1),
    )
    pasts = assert_shape(node, past_key, cache_shape), assert_shape(node, past_value, cache_shape)
    if quantization.format is None:
        return quantization, new.append(pasts[0], k, 3, 1), new.append(pasts[1], v, 4, 2)
    return quantization, *new.append_quantized(pasts, (k, v), quantization, quantization.format)


def _read_window(node: Node, is_causal: bool) -> Window | None:
    """Return the window; local_window_size counts the query's own token."""
    window = node.attr("local_window_size", -1)
    if window != -1 and (window < 1 or not is_causal):
        raise node.error(
            "group_query_attention.window_unsupported",
            f"attribute local_window_size is {window}, and causal is {int(is_causal)}.",
            "Use -1, or a positive window with causal = 1.",
        )
    return Window(None if window == -1 else window - 1, 0, "lengths") if is_causal else None


def _read_sink(node: Node, heads: int, head_sink: Value | None, dtype: str) -> Value | None:
    """Return the sinks [Hq]: the input, or 0 for smooth_softmax."""
    if head_sink is not None:
        return read_head_sink(node, heads, head_sink, dtype)
    return node.constant(np.zeros(heads, dtype)) if node.attr("smooth_softmax", -1) == 1 else None


def _check_bias(node: Node, bias: Value, scores: tuple[Size, int, Size]) -> Value:
    """Return attention_bias [B or 1, H or 1, S, total_sequence_length], after checking its shape."""
    require_rank(node, "attention_bias", bias, "[batch, heads, rows, keys]")
    for size, expected in zip(bias.shape, scores):
        if not is_one(size):
            unify_sizes(node, "a dimension of attention_bias", size, expected)
    shape = tuple(1 if is_one(size) else expected for size, expected in zip(bias.shape, scores))
    return assert_shape(node, bias, (*shape, bias.shape[3]))
