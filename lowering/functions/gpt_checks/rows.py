"""Checks that the rows of qkv and the lengths of gpt_attention's requests fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .values import INTEGERS, as_int64, check_array, check_integer, check_shape, find_first, refuse

if TYPE_CHECKING:
    from .settings import CallSettings

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_BY_REQUEST = ("host_request_types", "host_past_key_value_lengths", "host_context_lengths")
_NEEDED = ("host_request_types", "host_past_key_value_lengths", "sequence_length")


@dataclass(frozen=True)
class QkvShape:
    """The shape of qkv: lead is (N,) for packed rows and (R, S) for padded ones."""

    dtype: np.dtype
    lead: tuple[int, ...]
    columns: int
    requests: int
    beams: int

    @property
    def is_padded(self) -> bool:
        return len(self.lead) == 2

    @property
    def count(self) -> int:
        return self.lead[0] * self.lead[1] if self.is_padded else self.lead[0]


@dataclass(frozen=True)
class RequestLengths:
    """The lengths, with one element for each request. Requests before `contexts` are in the context phase.

    total is the length including this call's tokens, own the number of these. reach is the number of positions that
    tables must have, rotated_length the length that longrope depends on.
    """

    contexts: int
    past: np.ndarray
    own: np.ndarray
    total: np.ndarray
    prompt: np.ndarray  # context_lengths
    reach: np.ndarray
    rotated_length: np.ndarray

    @property
    def longest_reach(self) -> int:
        return int(self.reach.max())


def check_qkv(qkv: Any, arguments: Mapping[str, Any], settings: CallSettings) -> QkvShape:
    """Check shapes and types of qkv, qkv_bias and of all arguments with one element for each request."""
    dtype, lead, columns = _check_projections(qkv, settings)
    if arguments["qkv_bias"] is not None:
        check_shape("qkv_bias", arguments["qkv_bias"], (dtype,), (columns,), "one number for each column of qkv")
    lengths = check_shape("context_lengths", arguments["context_lengths"], INTEGERS, ("requests",))
    requests, beams, requirement = len(lengths), 1, "as long as context_lengths"
    for name in _NEEDED if settings.has_cache else ():
        if arguments[name] is None:
            refuse(
                "gpt_attention.lengths_missing",
                f"{name} is missing",
                f"give an integer for each request, {requirement}, or set use_cache to False",
            )
    for name in _BY_REQUEST:
        if arguments[name] is not None:
            check_shape(name, arguments[name], INTEGERS, (requests,), requirement)
    table = arguments["cache_indirection"]
    if table is not None:
        beams = check_shape(
            "cache_indirection", table, INTEGERS, (requests, "beams", "tokens"), "with requests as in context_lengths"
        ).shape[1]
        if not beams:
            refuse(
                "gpt_attention.beam_count_zero",
                "cache_indirection has no beams",
                "make its second axis at least 1 long",
            )
    if settings.is_streaming and beams > 1:
        refuse(
            "gpt_attention.streaming_with_beams",
            f"streamingllm is True, and cache_indirection has {beams} beams",
            "use one beam, or set streamingllm to False",
        )
    total = arguments["sequence_length"]
    if total is not None and check_array("sequence_length", total, INTEGERS).shape not in (
        (requests,),
        (requests * beams,),
    ):
        shapes = f"({requests},)" + (f" or ({requests * beams},)" if beams > 1 else "")
        refuse(
            "gpt_attention.shape_mismatch",
            f"sequence_length has the shape {total.shape}",
            f"make it {shapes}, {requirement}",
        )
    if arguments["max_context_length"] is not None:
        check_integer("max_context_length", arguments["max_context_length"], 0)
    if len(lead) == 2 and lead[0] not in (requests, requests * beams):
        refuse(
            "gpt_attention.sequence_count_mismatch",
            f"qkv is padded and has {lead[0]} sequences, and context_lengths {requests} requests",
            "give one sequence for each request in context, one for each request and beam in generation",
        )
    return QkvShape(dtype, lead, columns, requests, beams)


def _check_projections(qkv: Any, settings: CallSettings) -> tuple[np.dtype, tuple[int, ...], int]:
    projections = qkv if isinstance(qkv, (list, tuple)) else [qkv]
    if len(projections) not in (1, 3) or (len(projections) == 1 and projections is qkv):
        refuse(
            "gpt_attention.qkv_count_unsupported",
            f"qkv is a list of {len(projections)}",
            "give one array, or a list of the three q, k and v",
        )
    names = ("qkv",) if len(projections) == 1 else ("qkv[0] (q)", "qkv[1] (k)", "qkv[2] (v)")
    arrays = [check_array(name, matrix, FLOATS) for name, matrix in zip(names, projections)]
    dtype, lead = arrays[0].dtype, arrays[0].shape[:-1]
    if arrays[0].ndim not in (2, 3):
        refuse(
            "gpt_attention.qkv_rank_unsupported",
            f"{names[0]} has the shape {arrays[0].shape}",
            "make it (rows, columns), or (sequences, rows, columns) with padding",
        )
    for name, matrix in zip(names[1:], arrays[1:]):
        if matrix.dtype != dtype or matrix.shape[:-1] != lead:
            refuse(
                "gpt_attention.qkv_mismatch",
                f"{name} is {matrix.dtype} of shape {matrix.shape} and {names[0]} {dtype} of shape {arrays[0].shape}",
                "give q, k and v of one type, with the same rows",
            )
    widths = [matrix.shape[-1] for matrix in arrays]
    legal = [[settings.queries, settings.keys, settings.keys]]
    if len(projections) == 1:
        legal = [[settings.columns], *([[settings.queries]] if settings.is_cross else [])]
    if widths not in legal:
        actual = " and ".join(map(str, widths))
        expected = " or ".join(" and ".join(map(str, legal_widths)) for legal_widths in legal)
        refuse(
            "gpt_attention.column_count_mismatch",
            f"qkv has {actual} columns, and num_heads {settings.heads}, num_kv_heads {settings.kv_heads} and "
            f"hidden_size_per_head {settings.size} require {expected}",
            "give columns for Q, K and V of all heads, or correct the sizes",
        )
    return dtype, lead, sum(widths)


def check_lengths(arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape) -> RequestLengths:
    """Check the lengths, and that qkv has as many rows."""
    prompt = as_int64(arguments["context_lengths"])
    generation = _find_generation(arguments, settings, rows)
    contexts = rows.requests - int(np.count_nonzero(generation))
    own = np.where(generation, 1, prompt)
    past, total = _check_past_and_total(arguments, settings, rows, own)
    _check_redundant(arguments, contexts, prompt)
    _check_row_count(rows, contexts, own)
    if settings.is_streaming and (wrong := past[:contexts] != 0).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.prompt_in_parts",
            f"streamingllm is True, and request {b}, which is in the context phase, has {past[b]} past tokens by "
            "host_past_key_value_lengths",
            "give the whole prompt in one call, or set streamingllm to False",
        )
    if rows.beams > 1 and settings.window is not None and (wrong := total > settings.window).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.window_too_short",
            f"host_max_attention_window_sizes gives a window of {settings.window} tokens, and request {b} has "
            f"{total[b]} and {rows.beams} beams",
            "use a window as long as the sequences, or one beam",
        )
    reach = total
    rotated_length = total
    if settings.is_streaming and settings.window is not None:
        before = settings.window if settings.is_trt_compatible else settings.window - 1
        reach = rotated_length = np.where(generation, np.minimum(past, before) + 1, total)
    return RequestLengths(contexts, past, own, total, prompt, reach, rotated_length)


def _find_generation(arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape) -> np.ndarray:
    types = arguments["host_request_types"]
    if types is None:
        return np.zeros(rows.requests, bool)
    generation = types == 1
    if (wrong := ~generation & (types != 0)).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.request_type_unknown",
            f"host_request_types of request {b} is {types[b]}",
            "use 0 for context and 1 for generation",
        )
    if (wrong := generation[:-1] & ~generation[1:]).any():
        b = find_first(wrong) + 1
        refuse(
            "gpt_attention.phases_out_of_order",
            f"host_request_types says that request {b} is in the context phase, after one in the generation phase",
            "put all requests in the context phase first",
        )
    if not settings.has_cache and generation.any():
        b = find_first(generation)
        refuse(
            "gpt_attention.cache_required",
            f"use_cache is False, and host_request_types says that request {b} is in the generation phase",
            "give a cache, or requests in the context phase alone",
        )
    if rows.is_padded and generation.any() and not generation.all():
        refuse(
            "gpt_attention.phases_mixed",
            "qkv is padded, and host_request_types has requests in both phases",
            "pack the rows, of shape (rows, columns), or make a call for each phase",
        )
    return generation


def _check_past_and_total(
    arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape, own: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each request before this call, and including those of the call."""
    past_lengths, total_lengths = arguments["host_past_key_value_lengths"], arguments["sequence_length"]
    past = np.zeros(rows.requests, np.int64) if past_lengths is None else as_int64(past_lengths)
    total = past + own
    if (wrong := own < 1).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.context_length_not_positive",
            f"context_lengths of request {b}, which is in the context phase, is {own[b]}",
            "give it at least one token, or leave it out",
        )
    # sums that overflow int64 are negative
    if (wrong := (past < 0) | (total < 1)).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.past_length_out_of_range",
            f"host_past_key_value_lengths of request {b} is {past[b]}",
            "give the number of tokens in the cache",
        )
    if not settings.has_cache and past.any():
        b = find_first(past != 0)
        refuse(
            "gpt_attention.past_without_cache",
            f"use_cache is False, and host_past_key_value_lengths says that {past[b]} tokens of request {b} are cached",
            "give the cache, or 0",
        )
    if total_lengths is None:
        return past, total
    repeats = rows.beams if total_lengths.shape != (rows.requests,) else 1
    if (wrong := total_lengths.reshape(-1, repeats) != total[:, None]).any():
        b, beam = (int(index) for index in np.argwhere(wrong)[0])
        where = f", beam {beam}," if repeats > 1 else ""
        refuse(
            "gpt_attention.sequence_length_mismatch",
            f"sequence_length of request {b}{where} is {total_lengths.reshape(-1, repeats)[b, beam]}, and "
            f"host_past_key_value_lengths {past[b]} and the {own[b]} of this call add up to {total[b]}",
            "set sequence_length to the length after the call",
        )
    return past, total


def _check_redundant(arguments: Mapping[str, Any], contexts: int, prompt: np.ndarray) -> None:
    host_lengths, longest = arguments["host_context_lengths"], arguments["max_context_length"]
    if host_lengths is not None and (wrong := host_lengths != prompt).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.context_length_mismatch",
            f"host_context_lengths of request {b} is {host_lengths[b]}, and context_lengths {prompt[b]}",
            "give equal lengths, or leave host_context_lengths out",
        )
    if longest is not None and (wrong := prompt[:contexts] > longest).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.max_context_length_too_small",
            f"max_context_length is {longest}, and context_lengths of request {b} is {prompt[b]}",
            "make it at least the longest, or leave it out",
        )


def _check_row_count(rows: QkvShape, contexts: int, own: np.ndarray) -> None:
    """Check that qkv has the rows of all requests, each of which has at least one row."""
    steps = rows.requests - contexts
    if not rows.is_padded:
        longest = int(own.max(initial=0))  # a sum of such numbers cannot overflow
        needed = longest if longest > rows.count else int(own[:contexts].sum()) + steps * rows.beams
        if needed != rows.count:
            refuse(
                "gpt_attention.row_count_mismatch",
                f"qkv has {rows.count} rows, and context_lengths of {contexts} requests in the context phase, with "
                f"{steps} in the generation phase{f' of {rows.beams} beams' if rows.beams > 1 else ''}, require "
                f"{'at least ' if longest > rows.count else ''}{needed}",
                "give as many rows, in the order of the requests",
            )
        return
    sequences = rows.requests * (rows.beams if steps else 1)
    if rows.lead[0] != sequences or (steps and rows.lead[1] != 1):
        shape = f"({sequences}, {1 if steps else 'rows'}, {rows.columns})"
        refuse(
            "gpt_attention.sequence_count_mismatch",
            f"qkv has the shape {(*rows.lead, rows.columns)}, and the requests of context_lengths are in the "
            f"{'generation' if steps else 'context'} phase{f', with {rows.beams} beams' if steps else ''}",
            f"make it {shape}",
        )
    if (wrong := own > rows.lead[1]).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.padding_too_short",
            f"qkv has {rows.lead[1]} rows for each request, and context_lengths of request {b} is {own[b]}",
            "pad all requests to the longest",
        )
