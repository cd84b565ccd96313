"""com.microsoft MultiHeadAttention: projected Q, K, V in any packing, caches by concatenation, finite masks."""

from __future__ import annotations

import math

from ....attention.record.problem import Window
from ....importing.node import Node
from ....importing.values import Size, Value
from ... import op
from ...attention.attend import concatenate_cache, describe_mask, lower_attention, move_heads_first
from ...helpers.assertions import assert_shape
from ...helpers.compute import number, unify_sizes
from .. import DOMAIN
from .masks import PaddingMask, ScoreMatrix, add_biases, read_filter_value, read_padding
from .projections import (
    check_cache_ranks,
    check_floats,
    check_pair,
    divide_heads,
    slice_interleaved,
    slice_projection,
    split_bias,
)
from .shared_buffer import SharedBuffer, append_to_shared_buffer, combine_lengths, trim_scores


@op("MultiHeadAttention", since=1, domain=DOMAIN)
def multi_head_attention(
    node: Node,
    query: Value,
    key: Value | None = None,
    value: Value | None = None,
    bias: Value | None = None,
    key_padding_mask: Value | None = None,
    attention_bias: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    past_sequence_length: Value | None = None,
    cache_indirection: Value | None = None,
) -> tuple[Value, Value | None, Value | None, Value | None]:
    """Return Y [B, S, H * Dv], the caches, and the scaled and masked scores [B, H, S, T].

    present_key and present_value are [B, H, T, D]. query is [B, S, H * D], or packed [B, S, H, 3, D] without key and
    value. key and value are [B, L, H * D], or packed in key [B, L, H, 2, D] without value, or already projected [B, H,
    L, D]. past_key and past_value are [B, H, P, D]. With past_sequence_length they have room, and the new rows are
    written to copies of them, present_key and present_value.
    """
    _check_caches(node, past_key, past_value, past_sequence_length, cache_indirection)
    heads = node.attr("num_heads")
    check_floats(node, query=query, key=key, value=value, bias=bias, past_key=past_key, past_value=past_value)
    q, k, v = _split_projections(node, heads, query, key, value, bias)
    q, k, v, past = _unify_sizes(node, heads, q, k, v, past_key)
    k, v, past, shared = _append_new_tokens(
        node, heads, (k, v), past, (past_key, past_value), past_sequence_length, cache_indirection
    )
    keys = k.shape[2] if k.rank == 4 else k.shape[1]
    if shared is not None:
        keys = shared.total
    scores = ScoreMatrix(q.shape[0], heads, q.shape[1], keys, read_filter_value(node))
    mask = (
        PaddingMask() if key_padding_mask is None else read_padding(node, "key_padding_mask", key_padding_mask, scores)
    )
    window = None
    if node.attr("unidirectional", 0):
        unify_sizes(node, "the sequence length of a unidirectional attention", q.shape[1], node.simplify(keys - past))
        window = Window(right=0, offset="zero" if past_key is None else "past")
    bias = add_biases(node, scores, attention_bias, mask.bias)
    results = lower_attention(
        node,
        {"q": q, "k": k, "v": v, "mask": bias, "past": past, **combine_lengths(node, shared, mask)},
        heads=(heads, heads),
        beams=None if shared is None else shared.beams,
        acc_dtype="float64" if q.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(q.shape[2] // heads),
        window=window,
        mask=describe_mask(bias, pad=shared is not None),
        qk_mode=2 if node.has_output(3) else None,
    )
    presents = k if node.has_output(1) else None, v if node.has_output(2) else None
    qk = results.get("qk")
    return results["y"], *presents, trim_scores(node, qk, keys) if shared is not None and qk is not None else qk


def _check_caches(
    node: Node,
    past_key: Value | None,
    past_value: Value | None,
    past_sequence_length: Value | None,
    cache_indirection: Value | None,
) -> None:
    """Check the ranks of caches, and which inputs go with them."""
    if past_sequence_length is not None and past_key is None:
        raise node.error(
            "node.input_missing",
            "past_sequence_length is given, and past_key is missing.",
            "Give the caches whose tokens it counts.",
        )
    check_cache_ranks(node, past_key, past_value)
    if cache_indirection is not None and past_sequence_length is None:
        raise node.error(
            "node.input_missing", "cache_indirection is given, and past_sequence_length is missing.", "Give both."
        )
    check_pair(node, past_key=past_key, past_value=past_value)


def _split_projections(
    node: Node, heads: int, query: Value, key: Value | None, value: Value | None, bias: Value | None
) -> tuple[Value, Value, Value]:
    """Return Q [B, S, H * D], and K and V in the same layout or [B, H, L, D].

    The bias is added to projections, and not to caches.
    """
    ranks = tuple(0 if x is None else x.rank for x in (query, key, value))
    if ranks == (5, 0, 0):
        _check_packed(node, "query", query, heads, 3)
        width = heads * query.shape[4]
        biases = split_bias(node, bias, (width,) * 3)
        q, k, v = (slice_interleaved(node, query, n, biases[n]) for n in range(3))
        return q, k, v
    if ranks not in ((3, 5, 0), (3, 3, 3), (3, 4, 4)):
        raise node.error(
            "node.rank_unsupported",
            f"inputs query, key and value have ranks {ranks}.",
            "Use ranks that the operator's schema allows.",
        )
    width = heads * divide_heads(node, "query", query.shape[2], heads)
    if ranks == (3, 5, 0):
        assert key is not None
        _check_packed(node, "key", key, heads, 2)
        biases = split_bias(node, bias, (width,) * 3)
        k, v = (slice_interleaved(node, key, n, biases[n + 1]) for n in range(2))
    elif ranks == (3, 3, 3):
        assert key is not None and value is not None
        key = assert_shape(node, key, (*key.shape[:2], width))
        v_width = number(node, "last dimension of value", value.shape[2])
        biases = split_bias(node, bias, (width, width, v_width))
        k, v = slice_projection(node, key, 0, width, biases[1]), slice_projection(node, value, 0, v_width, biases[2])
    else:
        assert key is not None and value is not None
        k, v = key, value
        biases = split_bias(node, bias, (width, width, heads * number(node, "head size of value", value.shape[3])))
    return slice_projection(node, query, 0, width, biases[0]), k, v


def _check_packed(node: Node, name: str, packed: Value, heads: int, count: int) -> None:
    if packed.shape[2] != heads or packed.shape[3] != count:
        raise node.error(
            "node.shape_mismatch",
            f"packed {name} has shape {list(packed.shape)}, for attribute num_heads = {heads}.",
            f"Make it [batch, sequence, {heads}, {count}, head size].",
        )
    number(node, f"head size of {name}", packed.shape[4])


def _unify_sizes(
    node: Node, heads: int, q: Value, k: Value, v: Value, past_key: Value | None
) -> tuple[Value, Value, Value, int]:
    """Return Q, K and V with equal sizes for equal meanings, and the length of the past."""
    axis = 2 if k.rank == 4 else 1
    batch = unify_sizes(node, "the batch size", q.shape[0], k.shape[0], v.shape[0])
    length = unify_sizes(node, "the sequence length of key and value", k.shape[axis], v.shape[axis])
    width = q.shape[2]
    size, v_size = width // heads, v.shape[3] if v.rank == 4 else divide_heads(node, "value", v.shape[2], heads)
    if k.rank == 4:
        unify_sizes(node, "the number of heads", heads, k.shape[1], v.shape[1])
        unify_sizes(node, "the head size of query and key", size, k.shape[3])
        k, v = (
            assert_shape(node, k, (batch, heads, length, size)),
            assert_shape(node, v, (batch, heads, length, v_size)),
        )
    else:
        k, v = assert_shape(node, k, (batch, length, width)), assert_shape(node, v, (batch, length, heads * v_size))
    past = 0 if past_key is None else past_key.shape[2]
    return assert_shape(node, q, (batch, q.shape[1], width)), k, v, past


def _append_new_tokens(
    node: Node,
    heads: int,
    new: tuple[Value, Value],
    past: Size,
    caches: tuple[Value | None, Value | None],
    past_sequence_length: Value | None,
    cache_indirection: Value | None,
) -> tuple[Value, Value, Size, SharedBuffer | None]:
    """Return all keys and values, the number of past ones, and the caches with room.

    `past` is the length of caches that grow.
    """
    (k, v), (past_key, past_value) = new, caches
    if past_key is None or past_value is None:
        if node.has_output(1) or node.has_output(2):
            k, v = move_heads_first(node, k, heads), move_heads_first(node, v, heads)
        return k, v, past, None
    if k.rank == 4:
        raise node.error(
            "node.conflicting_inputs",
            "inputs past_key and a projected key [B, H, L, D] exclude each other.",
            "Remove one of them.",
        )
    if past_sequence_length is not None:
        shared = append_to_shared_buffer(
            node, heads, new, (past_key, past_value), past_sequence_length, cache_indirection
        )
        return shared.k, shared.v, shared.past, shared
    past_key = assert_shape(node, past_key, (k.shape[0], heads, past, k.shape[2] // heads))
    past_value = assert_shape(node, past_value, (k.shape[0], heads, past, v.shape[2] // heads))
    k = concatenate_cache(node, past_key, move_heads_first(node, k, heads))
    v = concatenate_cache(node, past_value, move_heads_first(node, v, heads))
    return k, v, past, None
