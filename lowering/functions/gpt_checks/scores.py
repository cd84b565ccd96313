"""Checks that masks, biases, slopes and scales of gpt_attention have the shapes, rows and keys of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .rows import QkvShape, RequestLengths
from .settings import CallSettings
from .values import FLOAT32, check_shape, find_first, refuse

_BOOL = (np.dtype(bool),)
_PACKED = (np.dtype(np.uint32), np.dtype(np.int32))
_BIAS = "relative_attention_bias"


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
    _check_bias(arguments[_BIAS], settings, rows)


def _check_bias(bias: Any, settings: CallSettings, rows: QkvShape) -> None:
    if bias is None:
        if settings.max_distance and not settings.is_cross:
            refuse(
                "gpt_attention.bias_missing",
                f"max_distance is {settings.max_distance}, and {_BIAS} is missing",
                "give a table (num_heads, buckets), or set max_distance to 0",
            )
        return
    dtypes = dict.fromkeys((rows.dtype, *FLOAT32))
    if not settings.max_distance:
        check_shape(
            _BIAS, bias, dtypes, (settings.heads, "rows", "keys"), "or (num_heads, buckets) with a max_distance"
        )
        return
    check_shape(_BIAS, bias, dtypes, (settings.heads, "buckets"), "or, with max_distance 0, (num_heads, rows, keys)")
    _check_distance(bias, settings, settings.is_bidirectional)


def _check_distance(bias: np.ndarray, settings: CallSettings, bidirectional: bool) -> None:
    exact = bias.shape[1] // (4 if bidirectional else 2)
    sides = " for both directions" if bidirectional else ""
    if exact < 1:
        refuse(
            "gpt_attention.bucket_count_too_small",
            f"{_BIAS} has {bias.shape[1]} buckets{sides}",
            f"give at least {4 if bidirectional else 2}",
        )
    if settings.max_distance <= exact:
        refuse(
            "gpt_attention.max_distance_too_small",
            f"max_distance is {settings.max_distance}, and {exact} of the {bias.shape[1]} buckets of {_BIAS}{sides} "
            "are for single distances",
            f"make max_distance greater than {exact}, or use fewer buckets",
        )


def check_scores(
    arguments: Mapping[str, Any],
    settings: CallSettings,
    rows: QkvShape,
    requests: RequestLengths,
    encoder: np.ndarray | None,
) -> None:
    """Check that masks and tables have all keys and positions of each request, and that two masks agree."""
    mask, packed = arguments["attention_mask"], arguments["attention_packed_mask"]
    keys = requests.total if encoder is None else encoder
    for name, value, columns in (
        ("attention_mask", mask, 0 if mask is None else mask.shape[1]),
        ("attention_packed_mask", packed, 0 if packed is None else packed.shape[1] * 32),
    ):
        if value is not None and (wrong := keys > columns).any():
            b = find_first(wrong)
            refuse(
                "gpt_attention.table_too_small",
                f"{name} has {columns} keys, and request {b} has {keys[b]}",
                "give a column for each key",
            )
    if mask is not None and packed is not None:
        _check_agreement(mask, packed, rows, requests, keys)
    logn, bias = arguments["logn_scaling"], arguments[_BIAS]
    if logn is not None:
        _check_reach("logn_scaling", len(logn), requests)
    if bias is None:
        return
    if not settings.max_distance:
        _check_reach(f"{_BIAS}, for rows,", bias.shape[1], requests)
        _check_reach(f"{_BIAS}, for keys,", bias.shape[2], requests)
    elif requests.contexts < rows.requests:
        _check_distance(bias, settings, False)  # in the generation phase there is one direction


def _check_reach(name: str, positions: int, requests: RequestLengths) -> None:
    if requests.longest_reach > positions:
        b = find_first(requests.reach > positions)
        refuse(
            "gpt_attention.table_too_small",
            f"{name} has {positions} positions, and request {b} needs position {requests.reach[b] - 1}",
            f"give at least {requests.longest_reach}",
        )


def _check_agreement(
    mask: np.ndarray, packed: np.ndarray, rows: QkvShape, requests: RequestLengths, keys: np.ndarray
) -> None:
    """Check that two masks agree where a row has a key; elsewhere they may contain anything."""
    bytes_ = np.ascontiguousarray(packed).view(np.uint32).astype("<u4", copy=False).view(np.uint8)
    shown = np.unpackbits(bytes_, axis=1, bitorder="little").view(bool)
    columns = min(mask.shape[1], shown.shape[1])
    row, key = np.nonzero(shown[:, :columns] != mask[:, :columns])
    if not len(row):
        return
    request = _map_rows_to_requests(rows, requests)[row]
    is_wrong = (request >= 0) & (key < keys[request])
    if is_wrong.any():
        n = find_first(is_wrong)
        refuse(
            "gpt_attention.masks_differ",
            f"attention_mask and attention_packed_mask differ in row {row[n]}, key {key[n]}, of request {request[n]}",
            "give one of them, or make them agree",
        )


def _map_rows_to_requests(rows: QkvShape, requests: RequestLengths) -> np.ndarray:
    """Return the request of each row of qkv; -1 for padding."""
    number, steps = np.arange(rows.requests), rows.requests - requests.contexts
    counts = requests.own.copy()
    counts[requests.contexts :] = rows.beams
    if not rows.is_padded or steps:
        return np.repeat(number, counts)
    inside = np.arange(rows.lead[1]) < counts[:, None]
    return np.where(inside, number[:, None], -1).reshape(-1)
