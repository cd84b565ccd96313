"""com.microsoft GroupQueryAttention: rotary embedding, cache update and causal attention of a decoder in one operator.

Batch b holds n = seqlens_k[b] + 1 valid tokens behind this call, whose S new ones start at position max(n - S, 0): at 0
in a first prompt, which may be padded on the right; what rows behind n give is undefined. A cache with room for more
than total_sequence_length tokens stays as long as it is, any other one grows to that length.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import relax, tirx

from ...attention.cache_layout import CacheLayout, Codec
from ...attention.kv_write import KvWrite
from ...attention.problem import Window
from ...importing.compute import Element, agreed, number
from ...importing.node import Node
from ...importing.values import Shape, Size, Value, is_one, static, storage_dtype
from ...tensorir.scatter import CacheUpdate, copy_and_update
from .. import op
from ..asserted import asserted
from ..attend import attend, heads_first, mask_of
from ..contents import sizes
from ..kernels import Read, compute
from ..kv_write import kv_write
from ..rotary_embedding import Head, rotate
from ..run_time import bind
from . import DOMAIN
from .codes import Codes, cache_codes
from .projections import check_floats, head_sink_of, head_size, normalized, part


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
    """Y [B, S, Hq * D], present_key and present_value [B, Hkv, T, D].

    query is [B, S, Hq * D] with key and value [B, S, Hkv * D], or packed [B, S, (Hq + 2 Hkv) * D] without them.
    Caches hold numbers, or codes that k_scale and v_scale belong to (codes.py), over which new tokens are seen, too.
    """
    _refuse(node, query_seqlens)
    if (past_key is None) != (past_value is None):
        raise node.error("one of past_key and past_value is given.", "Give both or none.")
    check_floats(node, query=query, key=key, value=value, attention_bias=attention_bias)
    heads = node.attr("num_heads"), node.attr("kv_num_heads")
    q, k, v = _projections(node, heads, query, key, value)
    size, rows = q.shape[2] // heads[0], q.shape[1]
    q = normalized(node, q, heads[0], q_norm_weight, "q_norm_epsilon")
    k = normalized(node, k, heads[1], k_norm_weight, "k_norm_epsilon")
    new = _NewTokens(node, seqlens_k, total_sequence_length, q)
    if node.attr("do_rotary", 0):
        if cos_cache is None or sin_cache is None:
            raise node.error("attribute do_rotary is 1, and cos_cache or sin_cache is missing.", "Give both.")
        head = Head(size, 2 * number(node, "last dimension of cos_cache", cos_cache.shape[1]), _interleaved(node))
        if head.rotated > size:
            raise node.error(f"cos_cache has {head.rotated // 2} angles, for heads of {size}.", "Give at most half.")
        positions = new.positions(position_ids)
        q, k = (rotate(node, head, x, cos_cache, sin_cache, positions) for x in (q, k))
    codes = Codes(None, {}, {})
    if past_key is not None and past_value is not None:
        if past_key.rank != 4 or past_value.rank != 4:
            raise node.error("past_key or past_value is not of rank 4.", "Make them [batch, heads, length, head size].")
        length = agreed(node, "the length of past_key and past_value", past_key.shape[2], past_value.shape[2])
        agreed(node, "the number of heads of the caches", heads[1], past_key.shape[1], past_value.shape[1])
        codes = cache_codes(node, (heads[1], size), q.dtype, (("k", past_key, k_scale), ("v", past_value, v_scale)))
        cache = (q.shape[0], heads[1], length, size // (codes.codec.packing if codes.codec is not None else 1))
        pasts = asserted(node, past_key, cache), asserted(node, past_value, cache)
        if codes.codec is None:
            k, v = new.behind(pasts[0], k, 3, 1), new.behind(pasts[1], v, 4, 2)
        else:
            k, v = new.coded(pasts, (k, v), codes, codes.codec)
    else:
        _refuse_codes(node, k_scale, v_scale)
    _check_width(node, codes.codec)
    if past_key is None and (node.wants(1) or node.wants(2)):
        k, v = heads_first(node, k, heads[1]), heads_first(node, v, heads[1])
    mask, causal = None, bool(node.attr("causal", 1))
    if attention_bias is not None:
        mask = _bias(node, attention_bias, (q.shape[0], heads[0], rows))
    sink, lengths = _sink(node, heads[0], head_sink, q.dtype), new.lengths(at_least_rows=causal)
    results = attend(
        node,
        {"q": q, "k": k, "v": v, "mask": mask, "sink": sink, "lengths": lengths, **codes.scales},
        heads=heads,
        codec=codes.codec,
        acc_dtype="float64" if q.dtype == "float64" else "float32",
        scale=node.attr("scale", 0.0) or 1 / math.sqrt(size),
        softcap=node.attr("softcap", 0.0),
        window=_window(node, causal),
        mask=mask_of(mask, pad=True),
    )
    return results["y"], k if node.wants(1) else None, v if node.wants(2) else None


def _refuse(node: Node, query_seqlens: Value | None) -> None:
    for name, remedy in (
        ("sliding_window_cache", "Use a cache of all tokens; local_window_size still skips the old ones."),
        ("qk_output", "Remove the output: the scores are never materialized."),
    ):
        if node.attr(name, 0):
            raise node.error(f"attribute {name} is {node.attr(name)}.", remedy)
    if query_seqlens is not None:
        raise node.error("input query_seqlens is given.", "Pad nothing: without it all rows are tokens.")


def _refuse_codes(node: Node, k_scale: Value | None, v_scale: Value | None) -> None:
    """Of a node without caches."""
    for name in ("k_quant_type", "v_quant_type"):
        if node.attr(name, "NONE") != "NONE":
            what = f"attribute {name} is '{node.attr(name)}', and there is no past_key."
            raise node.error(what, "Give caches of codes, which may be empty: their type tells what codes are.")
    if k_scale is not None or v_scale is not None:
        raise node.error("k_scale or v_scale is given, and no past_key.", "Give caches of codes; they may be empty.")


def _check_width(node: Node, codec: Codec | None) -> None:
    width, wanted = node.attr("kv_cache_bit_width", 0), 0 if codec is None else 8 // codec.packing
    if width not in (0, wanted):
        remedy = "Use caches of int8 or float8e4m3fn for 8 bits, of uint8 for 4, and k_quant_type and v_quant_type."
        raise node.error(f"attribute kv_cache_bit_width is {width}, for caches of {wanted or 'no'} bits.", remedy)


def _projections(
    node: Node, heads: tuple[int, int], query: Value, key: Value | None, value: Value | None
) -> tuple[Value, Value, Value]:
    if heads[1] < 1 or heads[0] % heads[1]:
        raise node.error(f"{heads[0]} query heads do not divide into {heads[1]} key/value heads.", "Use a multiple.")
    if any(x is not None and x.rank != 3 for x in (query, key, value)):
        raise node.error("query, key or value is not of rank 3.", "Make them [batch, sequence, hidden].")
    if key is None or value is None:
        if key is not None or value is not None:
            raise node.error("one of key and value is given.", "Give both, or none and pack them in query.")
        size = head_size(node, "packed query", query.shape[2], heads[0] + 2 * heads[1])
        widths = [count * size for count in (heads[0], heads[1], heads[1])]
        q, k, v = (part(node, query, sum(widths[:n]), widths[n]) for n in range(3))
        return q, k, v
    size = head_size(node, "query", query.shape[2], heads[0])
    batch = agreed(node, "the batch size", *(x.shape[0] for x in (query, key, value)))
    rows = agreed(node, "the sequence length", *(x.shape[1] for x in (query, key, value)))
    for name, x in (("key", key), ("value", value)):
        agreed(node, f"the last dimension of {name}", x.shape[2], heads[1] * size)
    q = asserted(node, query, (batch, rows, heads[0] * size))
    k, v = (asserted(node, x, (batch, rows, heads[1] * size)) for x in (key, value))
    return q, k, v


def _interleaved(node: Node) -> bool:
    return bool(node.attr("rotary_interleaved", 0))


class _NewTokens:
    """Where the new tokens of each batch lie in its sequence."""

    def __init__(self, node: Node, seqlens_k: Value, total: Value, q: Value) -> None:
        self.node, self.total = node, total
        self.batch, self.rows = q.shape[:2]
        if seqlens_k.rank not in (1, 2) or (seqlens_k.rank == 2 and not is_one(seqlens_k.shape[1])):
            raise node.error(f"seqlens_k is {list(seqlens_k.shape)}.", "Make it [batch].")
        one = (1,) * (seqlens_k.rank - 1)
        self.seqlens_k = asserted(node, seqlens_k, (self.batch, *one))
        self._zeros = (tirx.const(0, "int64"),) * len(one)

    def lengths(self, at_least_rows: bool) -> Value:
        """How many keys of each batch count: in a causal first prompt all, as no row sees the padding behind it."""

        def length(index: tuple[Element, ...], seqlens_k: Read, rows: Element) -> Element:
            valid = self._valid(index[0], seqlens_k)
            return tirx.max(valid, rows) if at_least_rows else valid

        return self._per_batch("lengths", length)

    def _start(self) -> Value:
        """The position of the first new token of each batch."""

        def start(index: tuple[Element, ...], seqlens_k: Read, rows: Element) -> Element:
            return tirx.max(self._valid(index[0], seqlens_k) - rows, tirx.const(0, "int64"))

        return self._per_batch("first_position", start)

    def _valid(self, b: Element, seqlens_k: Read) -> Element:
        return seqlens_k(b, *self._zeros).astype("int64") + tirx.const(1, "int64")

    def _per_batch(self, name: str, element: Callable[..., Element]) -> Value:
        return compute(self.node, name, element, [self.seqlens_k], (self.batch,), [self.rows], dtype="int64")

    def positions(self, given: Value | None) -> Value:
        """The positions [B, S] of the new tokens. Of the given ones a first prompt uses only the very first."""
        shape = (self.batch, self.rows)
        if given is None:
            return compute(self.node, "positions", lambda i, at: at(i[0]) + i[1], [self._start()], shape)
        if given.rank != 2:
            raise self.node.error(f"position_ids has rank {given.rank}.", "Make it [batch, sequence].")
        given = asserted(self.node, given, shape)
        zeros = (tirx.const(0, "int64"),)

        def position(index: tuple[Element, ...], given: Read, total: Read, rows: Element) -> Element:
            first_prompt = total(*zeros * self.total.rank).astype("int64") == rows
            return tirx.Select(first_prompt, given(*zeros * 2) + index[1], given(*index))

        return compute(self.node, "positions", position, [given, self.total], shape, [self.rows], dtype="int64")

    def behind(self, past: Value, new: Value, past_input: int, present_output: int) -> Value:
        """The cache [B, H, T, D] with the new rows [B, S, H * D] in their places."""
        node, (batch, heads, length, size) = self.node, past.shape
        grown = node.simplify(tirx.max(_int64(length), _int64(self._total())))
        if node.symbols.equal(grown, length):
            return self._updated(past, heads_first(node, new, heads))
        if node.wants(present_output) and node.same_shape(past_input, present_output):
            checked = asserted(node, past, (batch, heads, grown, size))  # the cache has room, as the model says
            return self._updated(asserted(node, checked, past.shape), heads_first(node, new, heads))
        return self._grown(past, new, grown)

    def coded(
        self, pasts: tuple[Value, Value], new: tuple[Value, Value], codes: Codes, codec: Codec
    ) -> tuple[Value, Value]:
        """The caches [B, H, T, D] of codes with those of the new rows [B, S, H * D] in their places."""
        node, (batch, heads, length, width) = self.node, pasts[0].shape
        size = width * codec.packing
        grown = node.simplify(tirx.max(_int64(length), _int64(self._total())))
        if not node.symbols.equal(grown, length):
            alike = all(node.wants(n) and node.same_shape(n + 2, n) for n in (1, 2))
            shape = (batch, heads, grown, width)
            if alike:  # the caches have room, as the model says
                k, v = (asserted(node, asserted(node, past, shape), past.shape) for past in pasts)
            else:
                k, v = (self._lengthened(past, shape) for past in pasts)
            pasts = k, v
        record = KvWrite(static(batch), heads, size, size, new[0].dtype, CacheLayout(codec=codec))
        rows = node.simplify(batch * self.rows)
        given = {f"new_{name}": node.reshaped(x, (rows, heads, size)) for name, x in zip("kv", new)}
        given |= {"row_starts": self._per_batch("row_starts", lambda i, _, rows: i[0] * _int64(rows))}
        given |= {"row_counts": self._per_batch("row_counts", lambda i, _, rows: _int64(rows))}
        given |= {"starts": self._start(), "k": pasts[0], "v": pasts[1], **codes.factors}
        caches = kv_write(node, record, given)
        return caches["k"], caches["v"]

    def _lengthened(self, past: Value, shape: Shape) -> Value:
        """The cache, with what follows it."""

        def element(index: tuple[Element, ...], past: Read, kept: Element) -> Element:
            return tirx.if_then_else(index[2] < kept, past(*index), tirx.const(0, storage_dtype(dtype)))

        dtype = past.dtype
        return compute(self.node, "longer_cache", element, [past], shape, [past.shape[2]])

    def _updated(self, past: Value, new: Value) -> Value:
        """By the kernel that can also work in place."""
        dims = tuple(map(static, past.shape))
        rows = static(self.rows)
        update = copy_and_update(CacheUpdate(past.dtype, dims, rows, axis=2))
        arguments = [self.node.tensor(x) for x in (past, new, self._start())]
        return self.node.call_tir(update, arguments, [(past.shape, past.dtype)], "update_cache")[0]

    def _grown(self, past: Value, new: Value, length: Size) -> Value:
        heads, size = past.shape[1], past.shape[3]
        width = tirx.const(size, "int64")

        def element(
            index: tuple[Element, ...], past: Read, new: Read, start: Read, kept: Element, rows: Element
        ) -> Element:
            b, h, t, d = index
            row = t - start(b)
            old = tirx.if_then_else(t < kept, past(*index), tirx.const(0, new_dtype))
            inside = tirx.all(row >= tirx.const(0, "int64"), row < rows)
            return tirx.if_then_else(inside, new(b, row, h * width + d), old)

        new_dtype = new.dtype
        return compute(
            self.node,
            "grown_cache",
            element,
            [past, new, self._start()],
            (self.batch, heads, length, size),
            [past.shape[2], self.rows],
        )

    def _total(self) -> Size:
        """total_sequence_length as a size: known at import, or read at run time."""
        known = sizes(self.total)
        if known is not None:
            return known[0]
        flat = relax.op.reshape(self.node.tensor(self.total), (1,))
        return bind(self.node, self.node.emit(flat))[0]


def _window(node: Node, causal: bool) -> Window | None:
    """local_window_size counts the query's own token."""
    window = node.attr("local_window_size", -1)
    if window != -1 and (window < 1 or not causal):
        raise node.error(
            f"attribute local_window_size is {window}, and causal {int(causal)}.", "Use -1, or causal = 1."
        )
    return Window(None if window == -1 else window - 1, 0, "lengths") if causal else None


def _sink(node: Node, heads: int, head_sink: Value | None, dtype: str) -> Value | None:
    """The sinks [Hq]: those given, else 0 for smooth_softmax."""
    if head_sink is not None:
        return head_sink_of(node, heads, head_sink, dtype)
    return node.constant(np.zeros(heads, dtype)) if node.attr("smooth_softmax", -1) == 1 else None


def _bias(node: Node, bias: Value, scores: tuple[Size, int, Size]) -> Value:
    """attention_bias [B or 1, H or 1, S, total_sequence_length]."""
    if bias.rank != 4:
        raise node.error(f"attention_bias has rank {bias.rank}.", "Make it [batch, heads, rows, keys].")
    for size, wanted in zip(bias.shape, scores):
        if not is_one(size):
            agreed(node, "a dimension of attention_bias", size, wanted)
    shape = tuple(1 if is_one(size) else wanted for size, wanted in zip(bias.shape, scores))
    return asserted(node, bias, (*shape, bias.shape[3]))


def _int64(size: Size) -> Element:
    return tirx.const(size, "int64") if isinstance(size, int) else size
