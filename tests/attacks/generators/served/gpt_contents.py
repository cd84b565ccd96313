"""Whether the contents of a legal-shaped call of GptAttention are legal, by the operator's own page.

Nothing here is shared with the compiled check, whose rules these are (runtime/native/requests_tensorrt_llm.c).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lowering.functions.gpt_checks.rows import QkvShape
from lowering.functions.gpt_checks.settings import CallSettings
from tests.attacks.attack import require
from tests.attacks.generators.served.gpt_slots import Ring, Window, blocks_fit, find_cache

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Lengths:
    """Lengths of requests: tokens before, of the call, and both; the prompt; and the positions that tables need."""

    contexts: int
    past: np.ndarray
    own: np.ndarray
    total: np.ndarray
    prompt: np.ndarray
    reach: np.ndarray


def contents_fit(arguments: Arguments, settings: CallSettings, rows: QkvShape) -> None:
    """Raise Illegal unless lengths, tables, slots and blocks fit each other."""
    window = _find_window(arguments, settings)
    lengths = _find_lengths(arguments, settings, rows, window)
    if not rows.requests:
        return
    encoder = _find_encoder(arguments, lengths) if settings.is_cross else None
    _tables_fit(arguments, settings, lengths, lengths.total if encoder is None else encoder)
    table = arguments["cache_indirection"]
    if table is not None and not settings.is_cross:
        _beams_fit(table, rows.beams, lengths, window)
    if settings.has_cache:
        ring, cache = Ring(arguments, settings, window), find_cache(arguments, settings)
        blocks_fit(cache, ring, settings, rows, lengths, window, encoder, table)


def _find_window(arguments: Arguments, settings: CallSettings) -> Window:
    sinks, sizes = arguments["host_sink_token_length"], arguments["host_max_attention_window_sizes"]
    sinks = 0 if sinks is None else int(np.ravel(sinks)[0])
    require(sinks >= 0, "sinks")
    if settings.is_cross or sizes is None:
        return Window(None, 0 if settings.is_cross else sinks, settings.is_trt_compatible)
    size = int(sizes[settings.layer % len(sizes)])
    require(size >= 1 and sinks < size, "window")
    return Window(size, sinks, settings.is_trt_compatible)


def _find_lengths(arguments: Arguments, settings: CallSettings, rows: QkvShape, window: Window) -> Lengths:
    prompt = arguments["context_lengths"].astype(np.int64)
    types, before, after = (
        arguments[name] for name in ("host_request_types", "host_past_key_value_lengths", "sequence_length")
    )
    types = np.zeros_like(prompt) if types is None else types
    require(np.isin(types, (0, 1)).all() and (np.diff(types.astype(np.int64)) >= 0).all(), "phases")
    contexts = int((types == 0).sum())
    steps = rows.requests - contexts
    require(settings.has_cache or not steps, "generation without a cache")
    require(not (rows.is_padded and steps and contexts), "phases of padded rows")
    own = np.where(types == 1, 1, prompt)
    past = np.zeros_like(prompt) if before is None else before.astype(np.int64)
    most = 1 << 40
    require(((own >= 1) & (own <= most) & (past >= 0) & (past <= most)).all(), "lengths")
    require(settings.has_cache or not past.any(), "a past without a cache")
    total = past + own
    if after is not None:
        require((after.reshape(rows.requests, -1) == total[:, None]).all(), "sequence_length")
    host = arguments["host_context_lengths"]
    require(host is None or (host == prompt).all(), "host_context_lengths")
    longest = arguments["max_context_length"]
    require(longest is None or (prompt[:contexts] <= longest).all(), "max_context_length")
    if rows.is_padded:
        sequences = rows.requests * (rows.beams if steps else 1)
        require(rows.lead[0] == sequences and (not steps or rows.lead[1] == 1), "sequences")
        require((own <= rows.lead[1]).all(), "padding")
    else:
        require(int(own[:contexts].sum()) + steps * rows.beams == rows.count, "rows")
    require(not (settings.is_streaming and past[:contexts].any()), "a prompt in parts")
    require(not (rows.beams > 1 and window.size is not None and (total > window.size).any()), "beams with a window")
    reach = total
    if settings.is_streaming and window.size is not None:
        limit = window.size - (0 if window.is_compatible else 1)
        reach = np.where(types == 1, np.minimum(past, limit) + 1, total)
    return Lengths(contexts, past, own, total, prompt, reach)


def _find_encoder(arguments: Arguments, lengths: Lengths) -> np.ndarray:
    encoder, kv = arguments["encoder_input_lengths"].astype(np.int64), arguments["cross_kv"]
    require((encoder >= 0).all(), "encoder_input_lengths")
    new = np.flatnonzero(lengths.past[: lengths.contexts] == 0)
    require(kv is not None or not len(new), "cross_kv is missing")
    if kv is not None and kv.ndim == 2:
        require(sum(map(int, encoder[new])) == len(kv), "cross_kv")
    elif kv is not None:
        require(len(kv) == len(new) and (encoder[new] <= kv.shape[1]).all(), "cross_kv")
    return encoder


def _tables_fit(arguments: Arguments, settings: CallSettings, lengths: Lengths, keys: np.ndarray) -> None:
    for name, bits in (("attention_mask", 1), ("attention_packed_mask", 32)):
        if arguments[name] is not None:
            require((keys <= arguments[name].shape[1] * bits).all(), name)
    sizes = {"logn_scaling": arguments["logn_scaling"]}
    for name, table in sizes.items():
        require(table is None or (lengths.reach <= len(table)).all(), name)
    bias = arguments["relative_attention_bias"]
    if bias is not None and not settings.max_distance:
        require((lengths.reach <= min(bias.shape[1:])).all(), "relative_attention_bias")
    elif bias is not None and lengths.contexts < len(lengths.past):
        exact = bias.shape[1] // 2  # one direction
        require(0 < exact < settings.max_distance, "max_distance")
    rotary = settings.rotary
    if rotary is None:
        return
    beyond = np.zeros_like(keys, bool)
    if rotary.scaling == "longrope":
        beyond = lengths.reach > rotary.original
        _positions_fit(arguments, rotary.dim, "long_rope_rotary_cos_sin", lengths.reach[beyond])
    _positions_fit(arguments, rotary.dim, "rotary_cos_sin", lengths.reach[~beyond])


def _positions_fit(arguments: Arguments, dim: int, name: str, reach: np.ndarray) -> None:
    if arguments[name] is not None:
        require((reach <= arguments[name].size // dim).all(), name)


def _beams_fit(table: np.ndarray, beams: int, lengths: Lengths, window: Window) -> None:
    for b in range(lengths.contexts, len(lengths.past)):
        prompt, past = int(lengths.prompt[b]), int(lengths.past[b])
        require(0 <= prompt <= past, "the prompt of beams")
        oldest = window.oldest(past, is_step=True)
        for token in range(prompt, past):
            if token < window.sinks or token >= oldest:
                require(token < table.shape[2], "cache_indirection ends")
                require(((table[b, :, token] >= 0) & (table[b, :, token] < beams)).all(), "a beam")
