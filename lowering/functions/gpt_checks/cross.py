"""Cross attention of gpt_attention: the keys and values of encoders, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .rows import Requests, Rows
from .settings import Settings
from .values import INTEGERS, array, first, int64, refuse, shaped

_LENGTHS = "encoder_input_lengths"


def check_cross_shapes(arguments: Mapping[str, Any], settings: Settings, rows: Rows) -> None:
    if arguments[_LENGTHS] is None:
        refuse(f"{_LENGTHS} is missing, and do_cross_attention is True", "give the number of keys of each request")
    shaped(_LENGTHS, arguments[_LENGTHS], INTEGERS, (rows.requests,), "as long as context_lengths")
    given, columns = arguments["cross_kv"], 2 * settings.keys
    if given is not None:
        front = ("requests", "tokens") if array("cross_kv", given, (rows.dtype,)).ndim == 3 else ("tokens",)
        why = "K and V of num_kv_heads heads, packed or padded to three axes"
        shaped("cross_kv", given, (rows.dtype,), (*front, columns), why)


def encoder_of(arguments: Mapping[str, Any], requests: Requests) -> np.ndarray:
    """encoder_input_lengths. cross_kv has the tokens of those requests that bring them."""
    encoder, given = int64(arguments[_LENGTHS]), arguments["cross_kv"]
    if (wrong := encoder < 0).any():
        b = first(wrong)
        refuse(f"{_LENGTHS} of request {b} is {encoder[b]}", "give the number of its keys")
    new = np.flatnonzero(requests.past[: requests.contexts] == 0)
    if given is None:
        if len(new):
            refuse(
                f"cross_kv is missing, and request {new[0]} is in the context phase with no past",
                "give the keys and values of its encoder",
            )
        return encoder
    lengths = encoder[new]
    what = f"{_LENGTHS} of the {len(new)} requests in the context phase with no past"
    if given.ndim == 2:
        longest = int(lengths.max(initial=0))  # a sum of such numbers cannot overflow
        if longest > len(given) or int(lengths.sum()) != len(given):
            total = sum(map(int, lengths))
            refuse(f"cross_kv has {len(given)} tokens, and {what} make {total}", "give those of these requests alone")
        return encoder
    if len(given) != len(new):
        refuse(
            f"cross_kv has {len(given)} sequences, and there are {len(new)} requests in the context phase with no past",
            f"give the tokens of these alone, each padded to the longest of {_LENGTHS}",
        )
    if (wrong := lengths > given.shape[1]).any():
        n = first(wrong)
        refuse(
            f"cross_kv has {given.shape[1]} tokens of each request, and {_LENGTHS} of request {new[n]} is {lengths[n]}",
            "pad to the longest",
        )
    return encoder
