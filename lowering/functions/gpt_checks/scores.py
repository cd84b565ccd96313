"""Masks, biases, slopes and scales of gpt_attention: whether they have the shapes, and the rows and keys, of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .rows import Requests, Rows
from .settings import Settings
from .values import FLOAT32, first, refuse, shaped

_BOOL = (np.dtype(bool),)
_WORDS = (np.dtype(np.uint32), np.dtype(np.int32))
_BIAS = "relative_attention_bias"


def check_score_shapes(arguments: Mapping[str, Any], settings: Settings, rows: Rows) -> None:
    why = "a row for each row of qkv, padding included"
    if arguments["attention_mask"] is not None:
        shaped("attention_mask", arguments["attention_mask"], _BOOL, (rows.count, "keys"), why)
    if arguments["attention_packed_mask"] is not None:
        shaped("attention_packed_mask", arguments["attention_packed_mask"], _WORDS, (rows.count, "keys / 32"), why)
    if settings.position.startswith("alibi") and arguments["alibi_slopes"] is not None:
        shaped("alibi_slopes", arguments["alibi_slopes"], FLOAT32, (settings.heads,), "a slope for each of num_heads")
    if arguments["logn_scaling"] is not None:
        shaped("logn_scaling", arguments["logn_scaling"], FLOAT32, ("positions",))
    name = "attention_output_orig_quant_scale"
    if arguments[name] is not None:
        shaped(name, arguments[name], FLOAT32, (1,))
    _bias(arguments[_BIAS], settings, rows)


def _bias(bias: Any, settings: Settings, rows: Rows) -> None:
    if bias is None:
        if settings.max_distance and not settings.cross:
            refuse(
                f"max_distance is {settings.max_distance}, and {_BIAS} is missing",
                "give a table (num_heads, buckets), or set max_distance to 0",
            )
        return
    dtypes = dict.fromkeys((rows.dtype, *FLOAT32))
    if not settings.max_distance:
        shaped(_BIAS, bias, dtypes, (settings.heads, "rows", "keys"), "or (num_heads, buckets) with a max_distance")
        return
    shaped(_BIAS, bias, dtypes, (settings.heads, "buckets"), "or, with max_distance 0, (num_heads, rows, keys)")
    _distance(bias, settings, settings.bidirectional)


def _distance(bias: np.ndarray, settings: Settings, bidirectional: bool) -> None:
    exact = bias.shape[1] // (4 if bidirectional else 2)
    sides = " for both directions" if bidirectional else ""
    if exact < 1:
        refuse(f"{_BIAS} has {bias.shape[1]} buckets{sides}", f"give at least {4 if bidirectional else 2}")
    if settings.max_distance <= exact:
        refuse(
            f"max_distance is {settings.max_distance}, and {exact} of the {bias.shape[1]} buckets of {_BIAS}{sides} "
            "are for single distances",
            f"make max_distance greater than {exact}, or use fewer buckets",
        )


def check_scores(
    arguments: Mapping[str, Any], settings: Settings, rows: Rows, requests: Requests, encoder: np.ndarray | None
) -> None:
    """Masks and tables have all keys and positions of each request; two masks say the same."""
    mask, packed = arguments["attention_mask"], arguments["attention_packed_mask"]
    keys = requests.total if encoder is None else encoder
    for name, given, columns in (
        ("attention_mask", mask, 0 if mask is None else mask.shape[1]),
        ("attention_packed_mask", packed, 0 if packed is None else packed.shape[1] * 32),
    ):
        if given is not None and (wrong := keys > columns).any():
            b = first(wrong)
            refuse(f"{name} has {columns} keys, and request {b} has {keys[b]}", "give a column for each key")
    if mask is not None and packed is not None:
        _agree(mask, packed, rows, requests, keys)
    logn, bias = arguments["logn_scaling"], arguments[_BIAS]
    if logn is not None:
        _reaches("logn_scaling", len(logn), requests)
    if bias is None:
        return
    if not settings.max_distance:
        _reaches(f"{_BIAS}, for rows,", bias.shape[1], requests)
        _reaches(f"{_BIAS}, for keys,", bias.shape[2], requests)
    elif requests.contexts < rows.requests:
        _distance(bias, settings, False)  # in the generation phase there is one direction


def _reaches(what: str, positions: int, requests: Requests) -> None:
    if requests.longest_reach > positions:
        b = first(requests.reach > positions)
        refuse(
            f"{what} has {positions} positions, and request {b} needs position {requests.reach[b] - 1}",
            f"give at least {requests.longest_reach}",
        )


def _agree(mask: np.ndarray, packed: np.ndarray, rows: Rows, requests: Requests, keys: np.ndarray) -> None:
    """Where a row has a key; elsewhere masks may hold anything."""
    bytes_ = np.ascontiguousarray(packed).view(np.uint32).astype("<u4", copy=False).view(np.uint8)
    shown = np.unpackbits(bytes_, axis=1, bitorder="little").view(bool)
    columns = min(mask.shape[1], shown.shape[1])
    row, key = np.nonzero(shown[:, :columns] != mask[:, :columns])
    if not len(row):
        return
    request = _request_of_rows(rows, requests)[row]
    wrong = (request >= 0) & (key < keys[request])
    if wrong.any():
        n = first(wrong)
        refuse(
            f"attention_mask and attention_packed_mask differ in row {row[n]}, key {key[n]}, of request {request[n]}",
            "give one of them, or make them agree",
        )


def _request_of_rows(rows: Rows, requests: Requests) -> np.ndarray:
    """The request of each row of qkv; -1 for padding."""
    number, steps = np.arange(rows.requests), rows.requests - requests.contexts
    counts = requests.own.copy()
    counts[requests.contexts :] = rows.beams
    if not rows.padded or steps:
        return np.repeat(number, counts)
    inside = np.arange(rows.lead[1]) < counts[:, None]
    return np.where(inside, number[:, None], -1).reshape(-1)
