"""Checks of cross attention of gpt_attention: the keys and values of encoders, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .rows import QkvShape, RequestLengths
from .settings import CallSettings
from .values import INTEGERS, as_int64, check_array, check_shape, find_first, refuse

_LENGTHS = "encoder_input_lengths"


def check_cross_shapes(arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape) -> None:
    if arguments[_LENGTHS] is None:
        refuse(
            "gpt_attention.encoder_lengths_missing",
            f"{_LENGTHS} is missing, and do_cross_attention is True",
            "give the number of keys of each request",
        )
    check_shape(_LENGTHS, arguments[_LENGTHS], INTEGERS, (rows.requests,), "as long as context_lengths")
    cross_kv, columns = arguments["cross_kv"], 2 * settings.keys
    if cross_kv is not None:
        leading = ("requests", "tokens") if check_array("cross_kv", cross_kv, (rows.dtype,)).ndim == 3 else ("tokens",)
        reason = "K and V of num_kv_heads heads, packed or padded to three axes"
        check_shape("cross_kv", cross_kv, (rows.dtype,), (*leading, columns), reason)


def check_encoder_lengths(arguments: Mapping[str, Any], requests: RequestLengths) -> np.ndarray:
    """Return encoder_input_lengths, after checking that cross_kv has the tokens of the requests that provide them."""
    encoder_lengths, kv = as_int64(arguments[_LENGTHS]), arguments["cross_kv"]
    if (wrong := encoder_lengths < 0).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.encoder_length_out_of_range",
            f"{_LENGTHS} of request {b} is {encoder_lengths[b]}",
            "give the number of its keys",
        )
    new = np.flatnonzero(requests.past[: requests.contexts] == 0)
    if kv is None:
        if len(new):
            refuse(
                "gpt_attention.cross_kv_missing",
                f"cross_kv is missing, and request {new[0]} is in the context phase with no past",
                "give the keys and values of its encoder",
            )
        return encoder_lengths
    lengths = encoder_lengths[new]
    subject = f"{_LENGTHS} of the {len(new)} requests in the context phase with no past"
    if kv.ndim == 2:
        longest = int(lengths.max(initial=0))  # a sum of such numbers cannot overflow
        if longest > len(kv) or int(lengths.sum()) != len(kv):
            total = sum(map(int, lengths))
            refuse(
                "gpt_attention.cross_kv_count_mismatch",
                f"cross_kv has {len(kv)} tokens, and {subject} require {total}",
                "give the tokens of only these requests",
            )
        return encoder_lengths
    if len(kv) != len(new):
        refuse(
            "gpt_attention.cross_kv_count_mismatch",
            f"cross_kv has {len(kv)} sequences, and there are {len(new)} requests in the context phase with no past",
            f"give the tokens of only these requests, each padded to the longest of {_LENGTHS}",
        )
    if (wrong := lengths > kv.shape[1]).any():
        n = find_first(wrong)
        refuse(
            "gpt_attention.cross_padding_too_short",
            f"cross_kv has {kv.shape[1]} tokens of each request, and {_LENGTHS} of request {new[n]} is {lengths[n]}",
            "pad all requests to the longest",
        )
    return encoder_lengths
