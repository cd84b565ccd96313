"""Checks of the contents of arrays: lengths, and what follows from them for masks, tables, slots and blocks.

The rules are those of compiled models, whose C code is called here (runtime/native/requests_tensorrt_llm.c). Python
checks arguments that are not inputs of a model, and that two masks agree, which models do not compare.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi

from ...compiling.build import load_bundled_functions
from ...importing.checks import TENSORRT_LLM
from ...ops.tensorrt_llm.table_checks import TABLES, list_numbers
from ...runtime.failures import describe_failure
from .rows import QkvShape
from .scores import BIAS, check_distance
from .settings import CallSettings
from .values import ArgumentError, find_first, refuse


@dataclass(frozen=True)
class RequestLengths:
    """Legal lengths, with one element for each request, of which the first `contexts` are in the context phase.

    own is the number of tokens of this call, keys the number of keys, prompt is context_lengths.
    """

    contexts: int
    own: np.ndarray
    keys: np.ndarray
    prompt: np.ndarray


def check_contents(
    inputs: Mapping[str, np.ndarray], arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape
) -> None:
    """Check contents, of the operator's inputs by name and of arguments that are not among them.

    Raises:
        ArgumentError: the call is illegal.
    """
    _check_tables(inputs, settings, rows)
    lengths = _find_lengths(inputs, settings)
    longest = arguments["max_context_length"]
    if longest is not None and (wrong := lengths.prompt[: lengths.contexts] > longest).any():
        b = find_first(wrong)
        refuse(
            "gpt_attention.max_context_length_too_small",
            f"max_context_length is {longest}, and context_lengths of request {b} is {lengths.prompt[b]}",
            "make it at least the longest, or leave it out",
        )
    if settings.max_distance and BIAS in inputs and lengths.contexts < rows.requests:
        check_distance(inputs[BIAS], settings, False)  # in the generation phase there is one direction
    if "attention_mask" in inputs and "attention_packed_mask" in inputs:
        _check_agreement(inputs["attention_mask"], inputs["attention_packed_mask"], rows, lengths)


def _check_tables(inputs: Mapping[str, np.ndarray], settings: CallSettings, rows: QkvShape) -> None:
    shapes = {name: array.shape for name, array in inputs.items()}
    block = inputs["past_key_value"].shape[-2] if "kv_cache_block_offsets" in inputs else 0
    numbers = list_numbers(settings, shapes, rows.beams, block, layer=0)
    first, *rest = (tvm_ffi.from_dlpack(inputs[name].copy("C")) if name in inputs else 0 for name in TABLES)
    try:
        _load_check()(first, tvm_ffi.Shape(tuple(map(int, numbers))), "gpt_attention", *rest)
    except ValueError as error:
        raise ArgumentError(*describe_failure(error)) from None


@functools.cache
def _load_check() -> tvm_ffi.Function:
    return load_bundled_functions((TENSORRT_LLM,))[TENSORRT_LLM]


def _find_lengths(inputs: Mapping[str, np.ndarray], settings: CallSettings) -> RequestLengths:
    prompt = inputs["context_lengths"].astype(np.int64)
    zeros = np.zeros_like(prompt)
    own = np.where(inputs.get("host_request_types", zeros) == 1, 1, prompt)
    total = inputs.get("host_past_key_value_lengths", zeros) + own
    keys = inputs["encoder_input_lengths"] if settings.is_cross else total
    return RequestLengths(int(np.count_nonzero(inputs.get("host_request_types", zeros) == 0)), own, keys, prompt)


def _check_agreement(mask: np.ndarray, packed: np.ndarray, rows: QkvShape, lengths: RequestLengths) -> None:
    """Check that two masks agree where a row has a key; elsewhere they may contain anything."""
    bytes_ = np.ascontiguousarray(packed).view(np.uint32).astype("<u4", copy=False).view(np.uint8)
    shown = np.unpackbits(bytes_, axis=1, bitorder="little").view(bool)
    columns = min(mask.shape[1], shown.shape[1])
    row, key = np.nonzero(shown[:, :columns] != mask[:, :columns])
    if not len(row):
        return
    request = _map_rows_to_requests(rows, lengths)[row]
    is_wrong = (request >= 0) & (key < lengths.keys[request])
    if is_wrong.any():
        n = find_first(is_wrong)
        refuse(
            "gpt_attention.masks_differ",
            f"attention_mask and attention_packed_mask differ in row {row[n]}, key {key[n]}, of request {request[n]}",
            "give one of them, or make them agree",
        )


def _map_rows_to_requests(rows: QkvShape, lengths: RequestLengths) -> np.ndarray:
    """Return the request of each row of qkv; -1 for padding."""
    number, steps = np.arange(rows.requests), rows.requests - lengths.contexts
    counts = lengths.own.copy()
    counts[lengths.contexts :] = rows.beams
    if not rows.is_padded or steps:
        return np.repeat(number, counts)
    inside = np.arange(rows.lead[1]) < counts[:, None]
    return np.where(inside, number[:, None], -1).reshape(-1)
