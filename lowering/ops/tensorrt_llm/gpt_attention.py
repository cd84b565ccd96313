"""GptAttention: requests in context and in generation phases, over a contiguous or paged cache, in one call.

The cache is read as it was before the call. If the new keys can be appended first, one attention reads all keys.
Otherwise there are two attentions, over the cache and over the call's own keys, merged by their log-sum-exp, and the
cache is updated after them. That is the case if a ring overwrites slots, if beams read each other's keys, or if new
keys are visible before their quantization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...attention.kv_write import Columns
from ...attention.record.cache_layout import CacheLayout, Offset
from ...attention.record.problem import AttentionProblem
from ...importing.node import Node
from ...importing.values import Size, Value
from .. import op
from ..attention.attend import call_attention_kernel, make_ragged_problem
from ..helpers import symbolic
from ..helpers.assertions import assert_shape, require
from ..helpers.compute import number
from ..helpers.kernels import compute
from ..helpers.requirements import require_input, require_tensor
from . import DOMAIN
from .cache import (
    GptCache,
    append_projections,
    append_rows,
    count_slots,
    read_cache,
    read_tokens_per_block,
    redirect_to_beams,
    restore_shape,
)
from .encoder import EncoderRows, locate_encoder_rows
from .merge import PartialAttention, merge_context, merge_lse, unpack_lse
from .requests import GptRequests, check_by_request, check_ints, locate_requests, require_nonempty
from .rotary import compute_angles
from .rows import Projections
from .scores import KeySet, ScoreTables, Scoring, build_scoring, read_score_tables
from .settings import GptSettings, read_settings
from .streaming import StreamedKeys, gather_rotated_keys, locate_streamed_keys
from .table_checks import check_tables

INPUTS = (
    "qkv", "past_key_value", "attention_mask", "attention_packed_mask", "sequence_length",
    "host_past_key_value_lengths", "host_max_attention_window_sizes", "host_sink_token_length", "context_lengths",
    "cache_indirection", "host_request_types", "kv_cache_block_offsets", "host_kv_cache_pool_mapping",
    "kv_orig_quant_scale", "kv_quant_orig_scale", "attention_output_orig_quant_scale", "rotary_inv_freq",
    "rotary_cos_sin", "long_rope_rotary_inv_freq", "long_rope_rotary_cos_sin", "alibi_slopes",
    "relative_attention_bias", "logn_scaling", "cross_kv", "encoder_input_lengths", "host_context_lengths", "qkv_bias",
)  # fmt: skip
"""The inputs in the order of the operator."""

FLOATS = ("float32", "float16", "bfloat16")

_TABLES = ("context_lengths", "host_request_types", "host_past_key_value_lengths", "host_max_attention_window_sizes",
           "host_sink_token_length")  # fmt: skip


@op("GptAttention", since=1, domain=DOMAIN)
def gpt_attention(node: Node, *values: Value | None) -> tuple[Value, Value | None, Value | None]:
    """Return context, the cache after the call, and lse."""
    settings = read_settings(node)
    inputs = {name: value for name, value in zip(INPUTS, values) if value is not None}
    original_inputs = dict(inputs)
    qkv = _read_qkv(node, settings, inputs)
    _check_inputs(node, settings, inputs)
    beams = number(node, "the beam width", inputs["cache_indirection"].shape[1]) if "cache_indirection" in inputs else 1
    if settings.is_streaming and (beams > 1 or settings.is_cross):
        raise node.error(
            "gpt_attention.streaming_unsupported",
            f"attribute streamingllm is 1, for {beams} beams and do_cross_attention = {int(settings.is_cross)}.",
            "Use one beam, and do_cross_attention = 0.",
        )
    qkv = _check_sequences(node, inputs, qkv, beams)
    padded_rows = qkv.shape[1] if qkv.rank == 3 else None
    rows = qkv.shape[0] if padded_rows is None else node.simplify(qkv.shape[0] * padded_rows)
    flat = node.reshape_to(qkv, (rows, qkv.shape[-1]))
    paged = "kv_cache_block_offsets" in inputs
    block = read_tokens_per_block(node, inputs["past_key_value"], paged) if settings.has_cache else 0
    inputs["context_lengths"] = check_tables(node, settings, original_inputs, beams, block)
    ints = {name: inputs[name] for name in _TABLES if name in inputs}
    if settings.is_cross:
        ints.pop("host_max_attention_window_sizes", None)
    capacity = count_slots(inputs, block) if settings.has_cache else rows
    requests = locate_requests(node, settings, ints, rows, padded_rows, beams, block, node.simplify(capacity))
    logn = inputs.get("logn_scaling")
    has_window = "host_max_attention_window_sizes" in ints
    stream = (
        locate_streamed_keys(node, settings, requests, has_window)
        if settings.is_streaming and settings.has_cache
        else None
    )
    positioned = requests if stream is None else stream.requests
    angle_table = compute_angles(node, settings, inputs, positioned) if settings.rotary is not None else None
    projections = Projections(settings, positioned, flat, inputs.get("qkv_bias"), angle_table, logn)
    tables = read_score_tables(node, settings, inputs, requests, qkv.dtype)
    dtype = "float32" if settings.quantized_dtype else qkv.dtype
    queries = projections.emit_queries(node, dtype)
    call = _GptCall(node, settings, inputs, requests, stream, projections, queries, beams, tables, has_window, capacity)
    partials, cache = call.emit()
    lse = None
    if len(partials) > 1:
        lse = merge_lse(node, partials[0]["lse"], partials[1]["lse"])
    row_axes = qkv.shape[:-1]
    context = merge_context(
        node, partials, lse, requests, (*row_axes, settings.heads * settings.size), qkv.dtype,
        inputs.get("attention_output_orig_quant_scale"),
    )  # fmt: skip
    cache_after = None if cache is None else restore_shape(node, cache)
    if not node.has_output(2):
        return context, cache_after, None
    return (
        context,
        cache_after,
        unpack_lse(node, partials[0]["lse"] if lse is None else lse, requests, (*row_axes, settings.heads)),
    )


@dataclass(frozen=True)
class _GptCall:
    node: Node
    settings: GptSettings
    inputs: Mapping[str, Value]
    requests: GptRequests
    stream: StreamedKeys | None
    projections: Projections
    queries: Value
    beams: int
    tables: ScoreTables
    has_window: bool
    capacity: Size

    def emit(self) -> tuple[list[PartialAttention], GptCache | None]:
        """Emit the attentions, and return them with the cache after the call."""
        settings, requests = self.settings, self.requests
        has_window = self.has_window
        if not settings.has_cache:
            return self.attend_to_encoder(None) if settings.is_cross else ([self.attend_to_own_keys(None)], None)
        has_ring = has_window or ("host_sink_token_length" in self.inputs and not settings.is_cross)
        cache = read_cache(self.node, settings, self.inputs, requests, self.beams, has_ring, self.projections.qkv.dtype)
        if settings.is_cross:
            return self.attend_to_encoder(cache)
        if self.stream is not None:
            past_attention = self.attend_to_streamed_keys(cache, self.stream)
            return [past_attention, self.attend_to_own_keys(cache)], append_projections(
                self.node, cache, self.projections, requests
            )
        is_unquantized = settings.quantized_dtype is not None and (
            settings.attends_unquantized or settings.has_fp8_context
        )
        if not (has_window or is_unquantized or self.beams > 1):
            cache = append_projections(self.node, cache, self.projections, requests)
            scoring = self.score_keys("all", has_window=False)
            keys = {"lengths": requests["lengths"], **cache.tensors}
            return [
                self.emit_attention(cache.layout, keys, requests.max_keys, scoring.fields, scoring.arguments)
            ], cache
        cache_before = cache
        if self.beams > 1:
            cache_before = redirect_to_beams(self.node, cache, requests, self.inputs["cache_indirection"], self.beams)
        scoring = self.score_keys("past", has_window)
        keys = {"lengths": requests["past"], **cache_before.tensors}
        past_attention = self.emit_attention(
            cache_before.layout, keys, requests.max_past, scoring.fields, scoring.arguments
        )
        return [past_attention, self.attend_to_own_keys(cache)], append_projections(
            self.node, cache, self.projections, requests
        )

    def score_keys(self, keys: KeySet, has_window: bool) -> Scoring:
        return build_scoring(self.node, self.settings, self.requests, self.stream, self.tables, keys, has_window)

    def attend_to_own_keys(self, cache: GptCache | None) -> PartialAttention:
        """Emit attention over the keys of this call."""
        dtype, starts = self.queries.dtype, self.requests["row_starts"]
        factors, scales = (None, None) if cache is None else (cache.factors, cache.scales)
        keys = {
            "k": self.projections.emit_keys(self.node, dtype, factors, scales),
            "v": self.projections.emit_values(self.node, dtype, factors, scales),
            "slot_starts": compute(self.node, "starts", lambda i, x: x(*i), [starts], (self.requests.sequences,)),
            "lengths": self.requests["counts"],
        }
        scoring = self.score_keys("new", self.has_window and self.stream is None)
        return self.emit_attention(
            CacheLayout("thd", Offset()), keys, self.requests.max_rows, scoring.fields, scoring.arguments
        )

    def attend_to_streamed_keys(self, cache: GptCache, stream: StreamedKeys) -> PartialAttention:
        """Emit attention over the visible keys of the cache, rotated to their positions in the stream."""
        scoring = self.score_keys("past", has_window=False)
        layout = self.build_problem(cache.layout, {})
        keys = gather_rotated_keys(self.node, self.settings, self.inputs, cache, stream, layout, self.requests["sinks"])
        return self.emit_attention(
            CacheLayout("thd", Offset()), keys, stream.max_keys, scoring.fields, scoring.arguments
        )

    def attend_to_encoder(self, cache: GptCache | None) -> tuple[list[PartialAttention], GptCache | None]:
        """Emit attention over the keys of an encoder, which the first call of a request writes to the cache."""
        node, settings, inputs = self.node, self.settings, self.inputs
        kv, width = inputs.get("cross_kv"), 2 * settings.kv_heads * settings.size
        if kv is not None:
            form = "[tokens, columns] or [batch, tokens, columns]"
            require_tensor(node, "cross_kv", kv, self.projections.qkv.dtype, form)
            kv = assert_shape(node, kv, (*kv.shape[:-1], width))
        padded_rows = kv.shape[1] if kv is not None and kv.rank == 3 else None
        count = 0 if kv is None else node.simplify(kv.shape[0] * (1 if padded_rows is None else padded_rows))
        room = count if cache is None else self.capacity
        encoder = locate_encoder_rows(
            node, inputs["encoder_input_lengths"], self.requests, self.beams, count, padded_rows, room
        )
        scoring = self.score_keys("past", has_window=False)

        def attend(layout: CacheLayout, keys: dict[str, Value], lengths: Value) -> PartialAttention:
            return self.emit_attention(
                layout, {**keys, "lengths": lengths}, encoder.max_keys, scoring.fields, scoring.arguments
            )

        if kv is None:
            if cache is None:
                raise node.error(
                    "node.input_missing", "cross_kv is missing, and use_cache is 0.", "Give the keys of the encoder."
                )
            return [attend(cache.layout, cache.tensors, encoder.lengths)], cache
        flat = node.reshape_to(kv, (count, width))
        own_keys = {**self.split_encoder_rows(flat), "slot_starts": encoder.firsts}
        if cache is None:
            return [attend(CacheLayout("thd", Offset()), own_keys, encoder.counts)], None
        cache_after = self.append_encoder_keys(cache, flat, encoder)
        if settings.quantized_dtype is None or not settings.attends_unquantized or settings.has_fp8_context:
            return [attend(cache_after.layout, cache_after.tensors, encoder.lengths)], cache_after
        cached_attention = attend(cache.layout, cache.tensors, encoder.cached)
        return [cached_attention, attend(CacheLayout("thd", Offset()), own_keys, encoder.counts)], cache_after

    def append_encoder_keys(self, cache: GptCache, rows: Value, encoder: EncoderRows) -> GptCache:
        settings = self.settings
        columns = Columns(0, settings.kv_heads * settings.size, 2 * settings.kv_heads * settings.size)
        tables: dict[str, Value | None] = {
            "row_starts": encoder.firsts, "row_counts": encoder.counts, "starts": encoder.starts,
        }  # fmt: skip
        return append_rows(
            self.node, cache, rows, columns, settings.kv_heads, tables, None, self.requests.sequences
        )  # fmt: skip

    def split_encoder_rows(self, rows: Value) -> dict[str, Value]:
        """Return keys and values [rows, Hkv, D] of cross_kv."""
        dtype, heads, size = self.queries.dtype, self.settings.kv_heads, self.settings.size
        shape = (rows.shape[0], heads, size)

        def slice_rows(first: int) -> Value:
            def element(index: tuple[Any, ...], row: Any) -> Any:
                return row(index[0], index[1] * size + index[2] + first).astype(dtype)

            return compute(self.node, "encoder_rows", element, [rows], shape, dtype=dtype)

        return {"k": slice_rows(0), "v": slice_rows(heads * size)}

    def emit_attention(
        self,
        layout: CacheLayout,
        keys: dict[str, Value],
        max_keys: Size,
        fields: dict[str, Any],
        arguments: dict[str, Value],
    ) -> PartialAttention:
        """Return y [rows, Hq, D] and lse [rows, Hq] of an attention over keys in a cache of this layout."""
        requests = self.requests
        arrays: dict[str, Any] = {"q": self.queries, **keys, **arguments, "row_starts": requests["row_starts"]}
        arrays |= {"most_rows": requests.max_rows, "most_keys": max_keys}
        return call_attention_kernel(self.node, self.build_problem(layout, fields), arrays, max_keys)

    def build_problem(self, layout: CacheLayout, fields: dict[str, Any]) -> AttentionProblem:
        settings = self.settings
        return make_ragged_problem(
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


def _read_qkv(node: Node, settings: GptSettings, inputs: dict[str, Value]) -> Value:
    qkv = inputs.get("qkv")
    if qkv is None or qkv.rank not in (2, 3) or qkv.dtype not in FLOATS:
        text = "missing" if qkv is None else f"{qkv.dtype} of rank {qkv.rank}"
        raise node.error(
            "node.tensor_type_unsupported",
            f"qkv is {text}.",
            f"Make it [rows, columns] or [sequences, rows, columns], {' or '.join(FLOATS)}.",
        )
    width, last = settings.width, number(node, "the last dimension of qkv", qkv.shape[-1])
    legal = (width, settings.heads * settings.size) if settings.is_cross else (width,)
    if last not in legal:
        raise node.error("node.shape_mismatch", f"qkv has {last} columns.", f"Make it {' or '.join(map(str, legal))}.")
    bias = inputs.get("qkv_bias")
    if bias is not None:
        require_tensor(node, "qkv_bias", bias, qkv.dtype, f"[{last}]")
        inputs["qkv_bias"] = assert_shape(node, bias, (last,))
    return qkv


def _check_sequences(node: Node, inputs: Mapping[str, Value], qkv: Value, beams: int) -> Value:
    """Return qkv, after checking numbers of sequences.

    Padded sequences of qkv, and sequence_length, must be as many as requests, or as requests times beams.
    """
    count = inputs["context_lengths"].shape[0]
    sequences = node.simplify(count * beams)
    by_sequence = {"qkv": qkv} if qkv.rank == 3 else {}
    if "sequence_length" in inputs:
        by_sequence["sequence_length"] = check_ints(node, "sequence_length", inputs["sequence_length"], 1)
    for name, value in by_sequence.items():
        size = value.shape[0]
        fits = symbolic.logical_or(symbolic.equal(size, count), symbolic.equal(size, sequences))
        text = f"dimension 0 of {name} is {{}}, for {{}} requests of {beams} beams."
        qkv = require(node, qkv, fits, "gpt_attention.sequence_count_mismatch", text, size, count)
    return qkv


def _check_inputs(node: Node, settings: GptSettings, inputs: dict[str, Value]) -> None:
    """Check that required inputs are present, and that inputs by request have one size.

    Raises:
        NodeError: an input is missing, or conflicts with other inputs.
    """
    required_names = ["context_lengths"]
    if settings.has_cache:
        required_names += ["past_key_value", "sequence_length", "host_past_key_value_lengths", "host_request_types"]
    if settings.is_cross:
        required_names.append("encoder_input_lengths")
        if "relative_attention_bias" in inputs:
            raise node.error(
                "node.conflicting_inputs",
                "relative_attention_bias is given, and do_cross_attention is 1.",
                "Leave it out.",
            )
    if settings.mask == "custom_mask" and "attention_packed_mask" not in inputs:
        required_names.append("attention_mask")
    for name in required_names:
        require_input(node, name, inputs.get(name), "Give it.")
    count = inputs["context_lengths"].shape[0]
    for name in ("context_lengths", "host_request_types", "host_past_key_value_lengths", "host_context_lengths"):
        if name in inputs:
            inputs[name] = check_by_request(node, name, inputs[name], count)
    for name in ("host_max_attention_window_sizes", "host_sink_token_length"):
        if name in inputs:
            inputs[name] = require_nonempty(node, name, check_ints(node, name, inputs[name], 1), 0)
    if "logn_scaling" in inputs:
        logn = inputs["logn_scaling"]
        require_tensor(node, "logn_scaling", logn, "float32", "[positions]")
        inputs["logn_scaling"] = require_nonempty(node, "logn_scaling", logn, 0)
    if "cache_indirection" in inputs:
        value = check_ints(node, "cache_indirection", inputs["cache_indirection"], 3)
        inputs["cache_indirection"] = assert_shape(node, value, (count, *value.shape[1:]))
