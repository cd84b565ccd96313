"""The rows of qkv and the lengths of gpt_attention's requests: whether they fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .values import INTEGERS, array, first, int64, integer, refuse, shaped

if TYPE_CHECKING:
    from .settings import Settings

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_BY_REQUEST = ("host_request_types", "host_past_key_value_lengths", "host_context_lengths")
_NEEDED = ("host_request_types", "host_past_key_value_lengths", "sequence_length")


@dataclass(frozen=True)
class Rows:
    """What shapes say: lead is (N,) of packed rows and (R, S) of padded ones."""

    dtype: np.dtype
    lead: tuple[int, ...]
    columns: int
    requests: int
    beams: int

    @property
    def padded(self) -> bool:
        return len(self.lead) == 2

    @property
    def count(self) -> int:
        return self.lead[0] * self.lead[1] if self.padded else self.lead[0]


@dataclass(frozen=True)
class Requests:
    """What lengths say, an element for each request. Requests before `contexts` are in the context phase.

    total is the length with this call's tokens, own the number of these. reach is how many positions tables must have,
    turned_length the length that longrope goes by.
    """

    contexts: int
    past: np.ndarray
    own: np.ndarray
    total: np.ndarray
    prompt: np.ndarray  # context_lengths
    reach: np.ndarray
    turned_length: np.ndarray

    @property
    def longest_reach(self) -> int:
        return int(self.reach.max())


def rows_of(qkv: Any, arguments: Mapping[str, Any], settings: Settings) -> Rows:
    """Checks shapes and types of qkv, qkv_bias and of all that has an element for each request."""
    dtype, lead, columns = _qkv(qkv, settings)
    if arguments["qkv_bias"] is not None:
        shaped("qkv_bias", arguments["qkv_bias"], (dtype,), (columns,), "one number for each column of qkv")
    lengths = shaped("context_lengths", arguments["context_lengths"], INTEGERS, ("requests",))
    requests, beams, each = len(lengths), 1, "as long as context_lengths"
    for name in _NEEDED if settings.cached else ():
        if arguments[name] is None:
            refuse(f"{name} is missing", f"give an integer for each request, {each}, or set use_cache to False")
    for name in _BY_REQUEST:
        if arguments[name] is not None:
            shaped(name, arguments[name], INTEGERS, (requests,), each)
    table = arguments["cache_indirection"]
    if table is not None:
        beams = shaped(
            "cache_indirection", table, INTEGERS, (requests, "beams", "tokens"), "with requests as in context_lengths"
        ).shape[1]
        if not beams:
            refuse("cache_indirection has no beams", "make its second axis at least 1 long")
    if settings.streaming and beams > 1:
        refuse(
            f"streamingllm is True, and cache_indirection has {beams} beams",
            "use one beam, or set streamingllm to False",
        )
    total = arguments["sequence_length"]
    if total is not None and array("sequence_length", total, INTEGERS).shape not in ((requests,), (requests * beams,)):
        shapes = f"({requests},)" + (f" or ({requests * beams},)" if beams > 1 else "")
        refuse(f"sequence_length has the shape {total.shape}", f"make it {shapes}, {each}")
    if arguments["max_context_length"] is not None:
        integer("max_context_length", arguments["max_context_length"], 0)
    if len(lead) == 2 and lead[0] not in (requests, requests * beams):
        refuse(
            f"qkv is padded and has {lead[0]} sequences, and context_lengths {requests} requests",
            "give one sequence for each request in context, one for each request and beam in generation",
        )
    return Rows(dtype, lead, columns, requests, beams)


def _qkv(qkv: Any, settings: Settings) -> tuple[np.dtype, tuple[int, ...], int]:
    parts = qkv if isinstance(qkv, (list, tuple)) else [qkv]
    if len(parts) not in (1, 3) or (len(parts) == 1 and parts is qkv):
        refuse(f"qkv is a list of {len(parts)}", "give one array, or a list of the three q, k and v")
    names = ("qkv",) if len(parts) == 1 else ("qkv[0] (q)", "qkv[1] (k)", "qkv[2] (v)")
    arrays = [array(name, part, FLOATS) for name, part in zip(names, parts)]
    dtype, lead = arrays[0].dtype, arrays[0].shape[:-1]
    if arrays[0].ndim not in (2, 3):
        refuse(
            f"{names[0]} has the shape {arrays[0].shape}",
            "make it (rows, columns), or (sequences, rows, columns) with padding",
        )
    for name, part in zip(names[1:], arrays[1:]):
        if part.dtype != dtype or part.shape[:-1] != lead:
            refuse(
                f"{name} is {part.dtype} of shape {part.shape} and {names[0]} {dtype} of shape {arrays[0].shape}",
                "give q, k and v of one type, with the same rows",
            )
    widths = [part.shape[-1] for part in arrays]
    legal = [[settings.queries, settings.keys, settings.keys]]
    if len(parts) == 1:
        legal = [[settings.columns], *([[settings.queries]] if settings.cross else [])]
    if widths not in legal:
        given = " and ".join(map(str, widths))
        wanted = " or ".join(" and ".join(map(str, one)) for one in legal)
        refuse(
            f"qkv has {given} columns, and num_heads {settings.heads}, num_kv_heads {settings.kv_heads} and "
            f"hidden_size_per_head {settings.size} make {wanted}",
            "give columns for Q, K and V of all heads, or correct the sizes",
        )
    return dtype, lead, sum(widths)


def requests_of(arguments: Mapping[str, Any], settings: Settings, rows: Rows) -> Requests:
    """Checks what the lengths are, and that the rows of qkv are as many."""
    prompt = int64(arguments["context_lengths"])
    generation = _generation(arguments, settings, rows)
    contexts = rows.requests - int(np.count_nonzero(generation))
    own = np.where(generation, 1, prompt)
    past, total = _lengths(arguments, settings, rows, own)
    _redundant(arguments, contexts, prompt)
    _rows(rows, contexts, own)
    if settings.streaming and (wrong := past[:contexts] != 0).any():
        b = first(wrong)
        refuse(
            f"streamingllm is True, and host_past_key_value_lengths says that {past[b]} tokens of request {b} came "
            "before, which is in the context phase",
            "give the whole prompt in one call, or set streamingllm to False",
        )
    if rows.beams > 1 and settings.window is not None and (wrong := total > settings.window).any():
        b = first(wrong)
        refuse(
            f"host_max_attention_window_sizes gives a window of {settings.window} tokens, and request {b} has "
            f"{total[b]} and {rows.beams} beams",
            "use a window as long as the sequences, or one beam",
        )
    reach = total
    turned = total
    if settings.streaming and settings.window is not None:
        before = settings.window if settings.compatible else settings.window - 1
        reach = turned = np.where(generation, np.minimum(past, before) + 1, total)
    return Requests(contexts, past, own, total, prompt, reach, turned)


def _generation(arguments: Mapping[str, Any], settings: Settings, rows: Rows) -> np.ndarray:
    types = arguments["host_request_types"]
    if types is None:
        return np.zeros(rows.requests, bool)
    generation = types == 1
    if (wrong := ~generation & (types != 0)).any():
        b = first(wrong)
        refuse(f"host_request_types of request {b} is {types[b]}", "use 0 for context and 1 for generation")
    if (wrong := generation[:-1] & ~generation[1:]).any():
        b = first(wrong) + 1
        refuse(
            f"host_request_types says that request {b} is in the context phase, behind one in the generation phase",
            "put all requests in the context phase first",
        )
    if not settings.cached and generation.any():
        b = first(generation)
        refuse(
            f"use_cache is False, and host_request_types says that request {b} is in the generation phase",
            "give a cache, or requests in the context phase alone",
        )
    if rows.padded and generation.any() and not generation.all():
        refuse(
            "qkv is padded, and host_request_types has requests in both phases",
            "pack the rows, of shape (rows, columns), or make a call for each phase",
        )
    return generation


def _lengths(
    arguments: Mapping[str, Any], settings: Settings, rows: Rows, own: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of each request before this call, and with its own."""
    given, whole = arguments["host_past_key_value_lengths"], arguments["sequence_length"]
    past = np.zeros(rows.requests, np.int64) if given is None else int64(given)
    total = past + own
    if (wrong := own < 1).any():
        b = first(wrong)
        refuse(
            f"context_lengths of request {b}, which is in the context phase, is {own[b]}",
            "give it at least one token, or leave it out",
        )
    # sums beyond the range of int64 are negative
    if (wrong := (past < 0) | (total < 1)).any():
        b = first(wrong)
        refuse(f"host_past_key_value_lengths of request {b} is {past[b]}", "give the number of tokens in the cache")
    if not settings.cached and past.any():
        b = first(past != 0)
        refuse(
            f"use_cache is False, and host_past_key_value_lengths says that {past[b]} tokens of request {b} are cached",
            "give the cache, or 0",
        )
    if whole is None:
        return past, total
    repeats = rows.beams if whole.shape != (rows.requests,) else 1
    if (wrong := whole.reshape(-1, repeats) != total[:, None]).any():
        b, beam = (int(at) for at in np.argwhere(wrong)[0])
        where = f", beam {beam}," if repeats > 1 else ""
        refuse(
            f"sequence_length of request {b}{where} is {whole.reshape(-1, repeats)[b, beam]}, and "
            f"host_past_key_value_lengths {past[b]} and the {own[b]} of this call make {total[b]}",
            "make sequence_length the length behind the call",
        )
    return past, total


def _redundant(arguments: Mapping[str, Any], contexts: int, prompt: np.ndarray) -> None:
    again, longest = arguments["host_context_lengths"], arguments["max_context_length"]
    if again is not None and (wrong := again != prompt).any():
        b = first(wrong)
        refuse(
            f"host_context_lengths of request {b} is {again[b]}, and context_lengths {prompt[b]}",
            "give the same numbers twice, or leave host_context_lengths out",
        )
    if longest is not None and (wrong := prompt[:contexts] > longest).any():
        b = first(wrong)
        refuse(
            f"max_context_length is {longest}, and context_lengths of request {b} is {prompt[b]}",
            "make it at least the longest, or leave it out",
        )


def _rows(rows: Rows, contexts: int, own: np.ndarray) -> None:
    """The rows of qkv are those of all requests, which are at least 1 long each."""
    steps = rows.requests - contexts
    if not rows.padded:
        longest = int(own.max(initial=0))  # a sum of such numbers cannot overflow
        needed = longest if longest > rows.count else int(own[:contexts].sum()) + steps * rows.beams
        if needed != rows.count:
            refuse(
                f"qkv has {rows.count} rows, and context_lengths of {contexts} requests in the context phase, with "
                f"{steps} in the generation phase{f' of {rows.beams} beams' if rows.beams > 1 else ''}, make "
                f"{'at least ' if longest > rows.count else ''}{needed}",
                "give as many rows, in the order of the requests",
            )
        return
    sequences = rows.requests * (rows.beams if steps else 1)
    if rows.lead[0] != sequences or (steps and rows.lead[1] != 1):
        shape = f"({sequences}, {1 if steps else 'rows'}, {rows.columns})"
        refuse(
            f"qkv has the shape {(*rows.lead, rows.columns)}, and the requests of context_lengths are in the "
            f"{'generation' if steps else 'context'} phase{f', with {rows.beams} beams' if steps else ''}",
            f"make it {shape}",
        )
    if (wrong := own > rows.lead[1]).any():
        b = first(wrong)
        refuse(
            f"qkv has {rows.lead[1]} rows for each request, and context_lengths of request {b} is {own[b]}",
            "pad to the longest",
        )
