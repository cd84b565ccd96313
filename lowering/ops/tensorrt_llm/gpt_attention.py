"""GptAttention: requests in context and in generation phases, over a contiguous or paged cache, in one call.

What earlier calls left is read as it was before this one. Where the new keys can simply be appended first, one
attention reads all. Else, where a ring gives slots away, where beams read each other's keys, or where the new keys are
seen before they become codes, there are two, over the cache and over the call's own keys, merged by their log-sum-exp;
the cache is updated behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...attention.cache_layout import CacheLayout, Offset
from ...attention.kv_write import Columns
from ...attention.problem import AttentionProblem
from ...importing import symbolic
from ...importing.compute import number
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..asserted import asserted, required
from ..attend import packed, solved
from ..kernels import compute
from . import DOMAIN
from .cache import Cache, appended, cache_of, present, projected, read_by_beams, slots_of, tokens_per_block
from .encoder import Encoder, encoder_of
from .legal import legal
from .merge import Part, context_of, lse_of, merged_lse
from .requests import Requests, at_least_one, by_request, check_ints, requests_of
from .rotary import angles
from .rows import Projections
from .scores import Keys, Scoring, Tables, scoring, tables_of
from .settings import Settings, settings_of
from .streaming import Stream, stream_of, turned_keys

INPUTS = (
    "qkv", "past_key_value", "attention_mask", "attention_packed_mask", "sequence_length",
    "host_past_key_value_lengths", "host_max_attention_window_sizes", "host_sink_token_length", "context_lengths",
    "cache_indirection", "host_request_types", "kv_cache_block_offsets", "host_kv_cache_pool_mapping",
    "kv_orig_quant_scale", "kv_quant_orig_scale", "attention_output_orig_quant_scale", "rotary_inv_freq",
    "rotary_cos_sin", "long_rope_rotary_inv_freq", "long_rope_rotary_cos_sin", "alibi_slopes",
    "relative_attention_bias", "logn_scaling", "cross_kv", "encoder_input_lengths", "host_context_lengths", "qkv_bias",
)  # fmt: skip
"""In the order of the operator."""

FLOATS = ("float32", "float16", "bfloat16")

_TABLES = ("context_lengths", "host_request_types", "host_past_key_value_lengths", "host_max_attention_window_sizes",
           "host_sink_token_length")  # fmt: skip


@op("GptAttention", since=1, domain=DOMAIN)
def gpt_attention(node: Node, *inputs: Value | None) -> tuple[Value, Value | None, Value | None]:
    """context, the cache after the call, and lse."""
    settings = settings_of(node)
    given = {name: value for name, value in zip(INPUTS, inputs) if value is not None}
    inputs_as_given = dict(given)
    qkv = _qkv(node, settings, given)
    _require(node, settings, given)
    beams = number(node, "the beam width", given["cache_indirection"].shape[1]) if "cache_indirection" in given else 1
    if settings.streaming and (beams > 1 or settings.cross):
        raise node.error("attribute streamingllm is 1.", "It goes with one beam, and without do_cross_attention.")
    qkv = _by_sequence(node, given, qkv, beams)
    each = qkv.shape[1] if qkv.rank == 3 else None
    rows = qkv.shape[0] if each is None else node.simplify(qkv.shape[0] * each)
    flat = node.reshaped(qkv, (rows, qkv.shape[-1]))
    paged = "kv_cache_block_offsets" in given
    block = tokens_per_block(node, given["past_key_value"], paged) if settings.use_cache else 0
    given["context_lengths"] = legal(node, settings, inputs_as_given, beams, block)
    ints = {name: given[name] for name in _TABLES if name in given}
    if settings.cross:
        ints.pop("host_max_attention_window_sizes", None)
    capacity = slots_of(given, block) if settings.use_cache else rows
    requests = requests_of(node, settings, ints, rows, each, beams, block, node.simplify(capacity))
    logn = given.get("logn_scaling")
    windowed = "host_max_attention_window_sizes" in ints
    stream = stream_of(node, settings, requests, windowed) if settings.streaming and settings.use_cache else None
    counted = requests if stream is None else stream.requests
    turned = angles(node, settings, given, counted) if settings.rotary is not None else None
    projections = Projections(settings, counted, flat, given.get("qkv_bias"), turned, logn)
    tables = tables_of(node, settings, given, requests, qkv.dtype)
    wide = "float32" if settings.codes else qkv.dtype
    queries = projections.queries(node, wide)
    call = _Call(node, settings, given, requests, stream, projections, queries, beams, tables, windowed, capacity)
    parts, cache = call.run()
    lse = None
    if len(parts) > 1:
        lse = merged_lse(node, parts[0]["lse"], parts[1]["lse"])
    front = qkv.shape[:-1]
    context = context_of(
        node, parts, lse, requests, (*front, settings.heads * settings.size), qkv.dtype,
        given.get("attention_output_orig_quant_scale"),
    )  # fmt: skip
    after = None if cache is None else present(node, cache)
    if not node.wants(2):
        return context, after, None
    return context, after, lse_of(node, parts[0]["lse"] if lse is None else lse, requests, (*front, settings.heads))


@dataclass(frozen=True)
class _Call:
    node: Node
    settings: Settings
    given: Mapping[str, Value]
    requests: Requests
    stream: Stream | None
    rows: Projections
    queries: Value
    beams: int
    tables: Tables
    windowed: bool
    capacity: Size

    def run(self) -> tuple[list[Part], Cache | None]:
        """The attentions whose sum is wanted, and the cache behind the call."""
        settings, requests = self.settings, self.requests
        windowed = self.windowed
        if not settings.use_cache:
            return self.cross(None) if settings.cross else ([self.own_keys(None)], None)
        ringed = windowed or ("host_sink_token_length" in self.given and not settings.cross)
        cache = cache_of(self.node, settings, self.given, requests, self.beams, ringed, self.rows.qkv.dtype)
        if settings.cross:
            return self.cross(cache)
        if self.stream is not None:
            old = self.streamed_keys(cache, self.stream)
            return [old, self.own_keys(cache)], projected(self.node, cache, self.rows, requests)
        unseen = settings.codes is not None and (settings.unquantized or settings.fp8_context)
        if not (windowed or unseen or self.beams > 1):
            cache = projected(self.node, cache, self.rows, requests)
            how = self.scoring("all", windowed=False)
            keys = {"lengths": requests["lengths"], **cache.tensors}
            return [self.attention(cache.layout, keys, requests.most_keys, how.fields, how.given)], cache
        before = cache
        if self.beams > 1:
            before = read_by_beams(self.node, cache, requests, self.given["cache_indirection"], self.beams)
        how = self.scoring("past", windowed)
        keys = {"lengths": requests["past"], **before.tensors}
        old = self.attention(before.layout, keys, requests.most_past, how.fields, how.given)
        return [old, self.own_keys(cache)], projected(self.node, cache, self.rows, requests)

    def scoring(self, keys: Keys, windowed: bool) -> Scoring:
        return scoring(self.node, self.settings, self.requests, self.stream, self.tables, keys, windowed)

    def own_keys(self, cache: Cache | None) -> Part:
        """Attention over the keys of this call."""
        dtype, starts = self.queries.dtype, self.requests["row_starts"]
        factors, scales = (None, None) if cache is None else (cache.factors, cache.scales)
        keys = {
            "k": self.rows.keys(self.node, dtype, factors, scales),
            "v": self.rows.values(self.node, dtype, factors, scales),
            "slot_starts": compute(self.node, "starts", lambda i, x: x(*i), [starts], (self.requests.sequences,)),
            "lengths": self.requests["counts"],
        }
        how = self.scoring("new", self.windowed and self.stream is None)
        return self.attention(CacheLayout("thd", Offset()), keys, self.requests.most_rows, how.fields, how.given)

    def streamed_keys(self, cache: Cache, stream: Stream) -> Part:
        """Attention over what counts of the cache, turned where it stands."""
        how = self.scoring("past", windowed=False)
        layout = self.problem(cache.layout, {})
        keys = turned_keys(self.node, self.settings, self.given, cache, stream, layout, self.requests["sinks"])
        return self.attention(CacheLayout("thd", Offset()), keys, stream.most, how.fields, how.given)

    def cross(self, cache: Cache | None) -> tuple[list[Part], Cache | None]:
        """Attention over the keys of an encoder, which the first call of a request writes."""
        node, settings, given = self.node, self.settings, self.given
        kv, width = given.get("cross_kv"), 2 * settings.kv_heads * settings.size
        if kv is not None:
            if kv.rank not in (2, 3) or kv.dtype != self.rows.qkv.dtype:
                raise node.error(f"cross_kv is {kv.dtype} of rank {kv.rank}.", "Make it like qkv, [rows, columns].")
            kv = asserted(node, kv, (*kv.shape[:-1], width))
        each = kv.shape[1] if kv is not None and kv.rank == 3 else None
        count = 0 if kv is None else node.simplify(kv.shape[0] * (1 if each is None else each))
        room = count if cache is None else self.capacity
        encoder = encoder_of(node, given["encoder_input_lengths"], self.requests, self.beams, count, each, room)
        how = self.scoring("past", windowed=False)

        def over(layout: CacheLayout, keys: dict[str, Value], lengths: Value) -> Part:
            return self.attention(layout, {**keys, "lengths": lengths}, encoder.most, how.fields, how.given)

        if kv is None:
            if cache is None:
                raise node.error("cross_kv is missing, and use_cache is 0.", "Give the keys of the encoder.")
            return [over(cache.layout, cache.tensors, encoder.lengths)], cache
        flat = node.reshaped(kv, (count, width))
        own = {**self.encoder_rows(flat), "slot_starts": encoder.firsts}
        if cache is None:
            return [over(CacheLayout("thd", Offset()), own, encoder.counts)], None
        after = self.with_encoder(cache, flat, encoder)
        if settings.codes is None or not settings.unquantized or settings.fp8_context:
            return [over(after.layout, after.tensors, encoder.lengths)], after
        old = over(cache.layout, cache.tensors, encoder.cached)
        return [old, over(CacheLayout("thd", Offset()), own, encoder.counts)], after

    def with_encoder(self, cache: Cache, rows: Value, encoder: Encoder) -> Cache:
        settings = self.settings
        columns = Columns(0, settings.kv_heads * settings.size, 2 * settings.kv_heads * settings.size)
        where: dict[str, Value | None] = {
            "row_starts": encoder.firsts, "row_counts": encoder.counts, "starts": encoder.starts,
        }  # fmt: skip
        return appended(
            self.node, cache, rows, columns, settings.kv_heads, where, None, self.requests.sequences
        )  # fmt: skip

    def encoder_rows(self, rows: Value) -> dict[str, Value]:
        """Keys and values [rows, Hkv, D] of cross_kv."""
        dtype, heads, size = self.queries.dtype, self.settings.kv_heads, self.settings.size
        shape = (rows.shape[0], heads, size)

        def part(first: int) -> Value:
            def element(index: tuple[Any, ...], row: Any) -> Any:
                return row(index[0], index[1] * size + index[2] + first).astype(dtype)

            return compute(self.node, "encoder_rows", element, [rows], shape, dtype=dtype)

        return {"k": part(0), "v": part(heads * size)}

    def attention(
        self, layout: CacheLayout, keys: dict[str, Value], most: Size, fields: dict[str, Any], given: dict[str, Value]
    ) -> Part:
        """y [rows, Hq, D] and lse [rows, Hq] of an attention over keys in that cache, in that type."""
        requests = self.requests
        arrays: dict[str, Any] = {"q": self.queries, **keys, **given, "row_starts": requests["row_starts"]}
        arrays |= {"most_rows": requests.most_rows, "most_keys": most}
        return solved(self.node, self.problem(layout, fields), arrays, most)

    def problem(self, layout: CacheLayout, fields: dict[str, Any]) -> AttentionProblem:
        settings = self.settings
        return packed(
            self.requests.sequences,
            (settings.heads, settings.kv_heads),
            settings.size,
            self.queries.dtype,
            layout,
            scale=settings.scale,
            lse=True,
            splits=settings.splits,
            **fields,
        )


def _qkv(node: Node, settings: Settings, given: dict[str, Value]) -> Value:
    qkv = given.get("qkv")
    if qkv is None or qkv.rank not in (2, 3) or qkv.dtype not in FLOATS:
        text = "missing" if qkv is None else f"{qkv.dtype} of rank {qkv.rank}"
        raise node.error(
            f"qkv is {text}.", f"Make it [rows, columns] or [sequences, rows, columns], {' or '.join(FLOATS)}."
        )
    width, last = settings.width, number(node, "the last dimension of qkv", qkv.shape[-1])
    legal = (width, settings.heads * settings.size) if settings.cross else (width,)
    if last not in legal:
        raise node.error(f"qkv has {last} columns.", f"Make it {' or '.join(map(str, legal))}.")
    bias = given.get("qkv_bias")
    if bias is not None:
        if bias.dtype != qkv.dtype or bias.rank != 1:
            raise node.error(f"qkv_bias is {bias.dtype} of rank {bias.rank}.", f"Make it {qkv.dtype} [{last}].")
        given["qkv_bias"] = asserted(node, bias, (last,))
    return qkv


def _by_sequence(node: Node, given: Mapping[str, Value], qkv: Value, beams: int) -> Value:
    """qkv, where padded sequences and sequence_length are requests, or requests and beams."""
    count = given["context_lengths"].shape[0]
    sequences = node.simplify(count * beams)
    sized = {"qkv": qkv} if qkv.rank == 3 else {}
    if "sequence_length" in given:
        sized["sequence_length"] = check_ints(node, "sequence_length", given["sequence_length"], 1)
    for name, value in sized.items():
        size = value.shape[0]
        fits = symbolic.logical_or(symbolic.equal(size, count), symbolic.equal(size, sequences))
        text = f"dimension 0 of {name} is {{}}, for {{}} requests of {beams} beams."
        qkv = required(node, qkv, fits, text, size, count)
    return qkv


def _require(node: Node, settings: Settings, given: dict[str, Value]) -> None:
    """Sees to it that inputs by request have one size. Raises NodeError for an input that is missing, or that does not
    go with the others."""
    needed = ["context_lengths"]
    if settings.use_cache:
        needed += ["past_key_value", "sequence_length", "host_past_key_value_lengths", "host_request_types"]
    if settings.cross:
        needed.append("encoder_input_lengths")
        if "relative_attention_bias" in given:
            raise node.error("relative_attention_bias is given, and do_cross_attention is 1.", "Leave it out.")
    if settings.mask == "custom_mask" and "attention_packed_mask" not in given:
        needed.append("attention_mask")
    for name in needed:
        if name not in given:
            raise node.error(f"{name} is missing.", "Give it.")
    count = given["context_lengths"].shape[0]
    for name in ("context_lengths", "host_request_types", "host_past_key_value_lengths", "host_context_lengths"):
        if name in given:
            given[name] = by_request(node, name, given[name], count)
    for name in ("host_max_attention_window_sizes", "host_sink_token_length"):
        if name in given:
            given[name] = at_least_one(node, name, check_ints(node, name, given[name], 1), 0)
    if "logn_scaling" in given:
        logn = given["logn_scaling"]
        if logn.dtype != "float32" or logn.rank != 1:
            raise node.error(f"logn_scaling is {logn.dtype} of rank {logn.rank}.", "Make it float32 [positions].")
        given["logn_scaling"] = at_least_one(node, "logn_scaling", logn, 0)
    if "cache_indirection" in given:
        value = check_ints(node, "cache_indirection", given["cache_indirection"], 3)
        given["cache_indirection"] = asserted(node, value, (count, *value.shape[1:]))
