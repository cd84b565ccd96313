"""Checks of the shapes and types of qkv and of the arguments with one element for each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from .values import INTEGERS, check_array, check_integer, check_shape, refuse

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
        legal = [[settings.width], *([[settings.queries]] if settings.is_cross else [])]
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
