"""Checks of cross attention of gpt_attention: the shapes of the keys and values of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rows import QkvShape
from .settings import CallSettings
from .values import INTEGERS, check_array, check_shape, refuse

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
