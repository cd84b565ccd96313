"""com.microsoft GroupQueryAttention: rotary embedding, cache update and causal attention of a decoder in one operator.

Batch b has n = seqlens_k[b] + 1 valid tokens after this call. Its S new tokens start at position max(n - S, 0), which
is 0 in a first prompt. That prompt may be padded on the right; results of rows from n on are undefined. A cache with
room for more than total_sequence_length tokens keeps its length, any other one grows to that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax, tirx

from ....attention.kv_write import KvWrite
from ....attention.record.cache_layout import CacheLayout, KvQuantization
from ....attention.record.problem import Window
from ....importing.compute import Element, number, unify_sizes
from ....importing.node import Node
from ....importing.values import Shape, Size, Value, is_one, static, storage_dtype
from ....tensorir.scatter import CacheUpdate, make_copying_update
from ... import op
from ...attention.attend import describe_mask, lower_attention, move_heads_first
from ...attention.kv_write import kv_write
from ...attention.rotary_embedding import RotatedHead, rotate_heads
from ...helpers.assertions import assert_shape
from ...helpers.contents import read_sizes
from ...helpers.kernels import ElementReader, compute
from ...helpers.run_time import bind_sizes
from .. import DOMAIN
from .projections import check_floats, check_pair, divide_heads, normalize_heads, read_head_sink, slice_projection
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
    new = _NewTokens(node, seqlens_k, total_sequence_length, q)
    if node.attr("do_rotary", 0):
        if cos_cache is None or sin_cache is None:
            raise node.error(
                "node.input_missing", "attribute do_rotary is 1, and cos_cache or sin_cache is missing.", "Give both."
            )
        head = RotatedHead(
            size, 2 * number(node, "last dimension of cos_cache", cos_cache.shape[1]), _is_interleaved(node)
        )
        if head.rotated > size:
            raise node.error(
                "node.angles_exceed_head",
                f"cos_cache has {head.rotated // 2} angles, for heads of {size} elements.",
                "Give at most half as many.",
            )
        positions = new.compute_positions(position_ids)
        q, k = (rotate_heads(node, head, x, cos_cache, sin_cache, positions) for x in (q, k))
    quantization = CacheQuantization(None, {}, {})
    if past_key is not None and past_value is not None:
        if past_key.rank != 4 or past_value.rank != 4:
            raise node.error(
                "node.rank_unsupported",
                "past_key or past_value is not of rank 4.",
                "Make them [batch, heads, length, head size].",
            )
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
            k, v = new.append(pasts[0], k, 3, 1), new.append(pasts[1], v, 4, 2)
        else:
            k, v = new.append_quantized(pasts, (k, v), quantization, quantization.format)
    else:
        reject_quantization(node, k_scale, v_scale)
    check_cache_width(node, quantization.format)
    if past_key is None and (node.has_output(1) or node.has_output(2)):
        k, v = move_heads_first(node, k, heads[1]), move_heads_first(node, v, heads[1])
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
        if node.attr(name, 0):
            raise node.error("node.attribute_unsupported", f"attribute {name} is {node.attr(name)}.", remedy)
    if query_seqlens is not None:
        raise node.error(
            "node.input_unsupported",
            "input query_seqlens is given.",
            "Remove it and the padding: without it, all rows are tokens.",
        )


def _split_projections(
    node: Node, heads: tuple[int, int], query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value]:
    if heads[1] < 1 or heads[0] % heads[1]:
        raise node.error(
            "group_query_attention.heads_not_divisible",
            f"{heads[0]} query heads do not divide into {heads[1]} key/value heads.",
            "Choose num_heads as a multiple of kv_num_heads.",
        )
    if any(x is not None and x.rank != 3 for x in (query, key, value)):
        raise node.error(
            "node.rank_unsupported", "query, key or value is not of rank 3.", "Make them [batch, sequence, hidden]."
        )
    if key is None or value is None:
        if key is not None or value is not None:
            raise node.error(
                "node.inputs_incomplete",
                "only one of key and value is given.",
                "Give both, or none and pack them in query.",
            )
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


class _NewTokens:
    """The positions of the new tokens of each batch in its sequence."""

    def __init__(self, node: Node, seqlens_k: Value, total: Value, q: Value) -> None:
        self.node, self.total = node, total
        self.batch, self.rows = q.shape[:2]
        if seqlens_k.rank not in (1, 2) or (seqlens_k.rank == 2 and not is_one(seqlens_k.shape[1])):
            raise node.error("node.shape_mismatch", f"seqlens_k has shape {list(seqlens_k.shape)}.", "Make it [batch].")
        unit_axes = (1,) * (seqlens_k.rank - 1)
        self.seqlens_k = assert_shape(node, seqlens_k, (self.batch, *unit_axes))
        self._zeros = (tirx.const(0, "int64"),) * len(unit_axes)

    def compute_lengths(self, at_least_rows: bool) -> Value:
        """Return the number of visible keys of each batch.

        In a causal first prompt these are all keys, since no row sees the padding after it.
        """

        def length(index: tuple[Element, ...], seqlens_k: ElementReader, rows: Element) -> Element:
            valid_count = self._count_valid(index[0], seqlens_k)
            return tirx.max(valid_count, rows) if at_least_rows else valid_count

        return self._compute_per_batch("lengths", length)

    def _compute_start(self) -> Value:
        """Return the position of the first new token of each batch."""

        def start(index: tuple[Element, ...], seqlens_k: ElementReader, rows: Element) -> Element:
            return tirx.max(self._count_valid(index[0], seqlens_k) - rows, tirx.const(0, "int64"))

        return self._compute_per_batch("first_position", start)

    def _count_valid(self, b: Element, seqlens_k: ElementReader) -> Element:
        return seqlens_k(b, *self._zeros).astype("int64") + tirx.const(1, "int64")

    def _compute_per_batch(self, name: str, element: Callable[..., Element]) -> Value:
        return compute(self.node, name, element, [self.seqlens_k], (self.batch,), [self.rows], dtype="int64")

    def compute_positions(self, position_ids: Value | None) -> Value:
        """Return the positions [B, S] of the new tokens.

        In a first prompt only the very first element of position_ids is used.
        """
        shape = (self.batch, self.rows)
        if position_ids is None:
            return compute(self.node, "positions", lambda i, start: start(i[0]) + i[1], [self._compute_start()], shape)
        if position_ids.rank != 2:
            raise self.node.error(
                "node.rank_unsupported", f"position_ids has rank {position_ids.rank}.", "Make it [batch, sequence]."
            )
        position_ids = assert_shape(self.node, position_ids, shape)
        zeros = (tirx.const(0, "int64"),)

        def position(
            index: tuple[Element, ...], position_ids: ElementReader, total: ElementReader, rows: Element
        ) -> Element:
            is_first_prompt = total(*zeros * self.total.rank).astype("int64") == rows
            return tirx.Select(is_first_prompt, position_ids(*zeros * 2) + index[1], position_ids(*index))

        return compute(self.node, "positions", position, [position_ids, self.total], shape, [self.rows], dtype="int64")

    def append(self, past: Value, new: Value, past_input: int, present_output: int) -> Value:
        """Return the cache [B, H, T, D] with the new rows [B, S, H * D] written to it."""
        node, (batch, heads, length, size) = self.node, past.shape
        grown = node.simplify(tirx.max(_int64(length), _int64(self._read_total())))
        if node.symbols.equal(grown, length):
            return self._update(past, move_heads_first(node, new, heads))
        if node.has_output(present_output) and node.declares_same_shape(past_input, present_output):
            checked = assert_shape(node, past, (batch, heads, grown, size))  # there is room, by the model's shapes
            return self._update(assert_shape(node, checked, past.shape), move_heads_first(node, new, heads))
        return self._grow(past, new, grown)

    def append_quantized(
        self,
        pasts: tuple[Value, Value],
        new: tuple[Value, Value],
        quantization: CacheQuantization,
        cache_format: KvQuantization,
    ) -> tuple[Value, Value]:
        """Return the quantized caches [B, H, T, D] with the new rows [B, S, H * D], quantized, written to them."""
        node, (batch, heads, length, width) = self.node, pasts[0].shape
        size = width * cache_format.packing
        grown = node.simplify(tirx.max(_int64(length), _int64(self._read_total())))
        if not node.symbols.equal(grown, length):
            has_room = all(node.has_output(n) and node.declares_same_shape(n + 2, n) for n in (1, 2))
            shape = (batch, heads, grown, width)
            if has_room:  # there is room, by the model's shapes
                k, v = (assert_shape(node, assert_shape(node, past, shape), past.shape) for past in pasts)
            else:
                k, v = (self._lengthen(past, shape) for past in pasts)
            pasts = k, v
        record = KvWrite(static(batch), heads, size, size, new[0].dtype, CacheLayout(quantization=cache_format))
        rows = node.simplify(batch * self.rows)
        arguments = {f"new_{name}": node.reshape_to(x, (rows, heads, size)) for name, x in zip("kv", new)}
        arguments |= {"row_starts": self._compute_per_batch("row_starts", lambda i, _, rows: i[0] * _int64(rows))}
        arguments |= {"row_counts": self._compute_per_batch("row_counts", lambda i, _, rows: _int64(rows))}
        arguments |= {"starts": self._compute_start(), "k": pasts[0], "v": pasts[1], **quantization.factors}
        caches = kv_write(node, record, arguments)
        return caches["k"], caches["v"]

    def _lengthen(self, past: Value, shape: Shape) -> Value:
        """Return the cache, extended by zeros."""

        def element(index: tuple[Element, ...], past: ElementReader, past_length: Element) -> Element:
            return tirx.if_then_else(index[2] < past_length, past(*index), tirx.const(0, storage_dtype(dtype)))

        dtype = past.dtype
        return compute(self.node, "longer_cache", element, [past], shape, [past.shape[2]])

    def _update(self, past: Value, new: Value) -> Value:
        """Update the cache by the kernel that can also work in place."""
        dims = tuple(map(static, past.shape))
        rows = static(self.rows)
        update = make_copying_update(CacheUpdate(past.dtype, dims, rows, axis=2))
        arguments = [self.node.tensor(x) for x in (past, new, self._compute_start())]
        return self.node.call_tir(update, arguments, [(past.shape, past.dtype)], "update_cache")[0]

    def _grow(self, past: Value, new: Value, length: Size) -> Value:
        heads, size = past.shape[1], past.shape[3]
        width = tirx.const(size, "int64")

        def element(
            index: tuple[Element, ...],
            past: ElementReader,
            new: ElementReader,
            start: ElementReader,
            past_length: Element,
            rows: Element,
        ) -> Element:
            b, h, t, d = index
            row = t - start(b)
            cached = tirx.if_then_else(t < past_length, past(*index), tirx.const(0, new_dtype))
            is_new = tirx.all(row >= tirx.const(0, "int64"), row < rows)
            return tirx.if_then_else(is_new, new(b, row, h * width + d), cached)

        new_dtype = new.dtype
        return compute(
            self.node,
            "grown_cache",
            element,
            [past, new, self._compute_start()],
            (self.batch, heads, length, size),
            [past.shape[2], self.rows],
        )

    def _read_total(self) -> Size:
        """Return total_sequence_length as a size: static at import, or read at run time."""
        static_sizes = read_sizes(self.total)
        if static_sizes is not None:
            return static_sizes[0]
        flat = relax.op.reshape(self.node.tensor(self.total), (1,))
        return bind_sizes(self.node, self.node.emit(flat))[0]


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
    if bias.rank != 4:
        raise node.error(
            "node.rank_unsupported", f"attention_bias has rank {bias.rank}.", "Make it [batch, heads, rows, keys]."
        )
    for size, expected in zip(bias.shape, scores):
        if not is_one(size):
            unify_sizes(node, "a dimension of attention_bias", size, expected)
    shape = tuple(1 if is_one(size) else expected for size, expected in zip(bias.shape, scores))
    return assert_shape(node, bias, (*shape, bias.shape[3]))


def _int64(size: Size) -> Element:
    return tirx.const(size, "int64") if isinstance(size, int) else size
