"""Checks that masks, biases, slopes and scales of gpt_attention have the shapes of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .rows import QkvShape
from .settings import CallSettings
from .values import FLOAT32, check_shape, refuse

_BOOL = (np.dtype(bool),)
_PACKED = (np.dtype(np.uint32), np.dtype(np.int32))
BIAS = "relative_attention_bias"


def check_score_shapes(arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape) -> None:
    reason = "a row for each row of qkv, padding included"
    if arguments["attention_mask"] is not None:
        check_shape("attention_mask", arguments["attention_mask"], _BOOL, (rows.count, "keys"), reason)
    if arguments["attention_packed_mask"] is not None:
        check_shape(
            "attention_packed_mask", arguments["attention_packed_mask"], _PACKED, (rows.count, "keys / 32"), reason
        )
    if settings.position.startswith("alibi") and arguments["alibi_slopes"] is not None:
        check_shape(
            "alibi_slopes", arguments["alibi_slopes"], FLOAT32, (settings.heads,), "a slope for each of num_heads"
        )
    if arguments["logn_scaling"] is not None:
        check_shape("logn_scaling", arguments["logn_scaling"], FLOAT32, ("positions",))
    name = "attention_output_orig_quant_scale"
    if arguments[name] is not None:
        check_shape(name, arguments[name], FLOAT32, (1,))
    _check_bias(arguments[BIAS], settings, rows)


def _check_bias(bias: Any, settings: CallSettings, rows: QkvShape) -> None:
    if bias is None:
        if settings.max_distance and not settings.is_cross:
            refuse(
                "gpt_attention.bias_missing",
                f"max_distance is {settings.max_distance}, and {BIAS} is missing",
                "give a table (num_heads, buckets), or set max_distance to 0",
            )
        return
    dtypes = dict.fromkeys((rows.dtype, *FLOAT32))
    if not settings.max_distance:
        check_shape(BIAS, bias, dtypes, (settings.heads, "rows", "keys"), "or (num_heads, buckets) with a max_distance")
        return
    check_shape(BIAS, bias, dtypes, (settings.heads, "buckets"), "or, with max_distance 0, (num_heads, rows, keys)")
    check_distance(bias, settings, settings.is_bidirectional)


def check_distance(bias: np.ndarray, settings: CallSettings, bidirectional: bool) -> None:
    """Check that distances beyond the exact ones have buckets."""
    exact = bias.shape[1] // (4 if bidirectional else 2)
    sides = " for both directions" if bidirectional else ""
    if exact < 1:
        refuse(
            "gpt_attention.bucket_count_too_small",
            f"{BIAS} has {bias.shape[1]} buckets{sides}",
            f"give at least {4 if bidirectional else 2}",
        )
    if settings.max_distance <= exact:
        refuse(
            "gpt_attention.max_distance_too_small",
            f"max_distance is {settings.max_distance}, and {exact} of the {bias.shape[1]} buckets of {BIAS}{sides} "
            "are for single distances",
            f"make max_distance greater than {exact}, or use fewer buckets",
        )
