"""A run-time check that the tables of a GptAttention fit each other, its rows and its cache."""

from __future__ import annotations

from collections.abc import Mapping

from ...importing.checks import TENSORRT_LLM
from ...importing.node import Node
from ...importing.values import Size, Value, is_one, prod
from ..helpers.assertions import assert_requests
from .rotary import list_angle_tables
from .settings import GptSettings

# The order is that of runtime/native/requests_tensorrt_llm.c.
_TABLES = (
    "context_lengths", "host_request_types", "host_past_key_value_lengths", "sequence_length", "host_context_lengths",
    "host_max_attention_window_sizes", "host_sink_token_length", "cache_indirection", "kv_cache_block_offsets",
    "host_kv_cache_pool_mapping", "encoder_input_lengths",
)  # fmt: skip


def check_tables(node: Node, settings: GptSettings, inputs: Mapping[str, Value], beams: int, block: int) -> Value:
    """Return context_lengths with the check attached.

    inputs are the node's inputs by name, as they are in the model, so that layers share a check. `block` is the number
    of tokens in a block of a paged cache. Ranks that do not fit are errors of the import, reported elsewhere.
    """
    tables = [inputs.get(name) for name in _TABLES]
    return assert_requests(node, TENSORRT_LLM, tables, _list_numbers(settings, inputs, beams, block))


def _list_numbers(settings: GptSettings, inputs: Mapping[str, Value], beams: int, block: int) -> list[Size]:
    """Return the numbers of the check, in the order of runtime/native/requests_tensorrt_llm.h."""
    qkv, cross = inputs["qkv"], _find_input(inputs, "cross_kv", 2, 3)
    padded, padded_cross = qkv.rank == 3, cross is not None and cross.rank == 3
    flags = (
        settings.has_cache,
        settings.is_cross,
        settings.is_streaming,
        settings.is_trt_compatible,
        settings.has_spare_block,
    )
    numbers: list[Size] = [int(flag) for flag in flags]
    numbers += [-1, *qkv.shape[:2]] if padded else [qkv.shape[0], -1, -1]
    numbers += [beams, settings.layer if _is_layer_dependent(inputs) else 0, block, *_list_cache_sizes(inputs, block)]
    numbers += [-1, -1, -1] if cross is None else [0, *cross.shape[:2]] if padded_cross else [cross.shape[0], -1, -1]
    mask, packed_mask = (_find_input(inputs, name, 2) for name in ("attention_mask", "attention_packed_mask"))
    numbers += [-1 if mask is None else mask.shape[1], -1 if packed_mask is None else packed_mask.shape[1] * 32]
    logn, bias = _find_input(inputs, "logn_scaling", 1), _find_input(inputs, "relative_attention_bias", 3)
    numbers += [-1 if logn is None else logn.shape[0], *((-1, -1) if bias is None else bias.shape[1:])]
    return [*numbers, *_list_angle_sizes(settings, inputs)]


def _is_layer_dependent(inputs: Mapping[str, Value]) -> bool:
    """Return whether the check depends on the node's layer."""
    windows = inputs.get("host_max_attention_window_sizes")
    pool = inputs.get("past_key_value")
    has_layers = "host_kv_cache_pool_mapping" in inputs or (pool is not None and pool.rank == 6)
    return has_layers or (windows is not None and not (windows.rank == 1 and is_one(windows.shape[0])))


def _list_cache_sizes(inputs: Mapping[str, Value], block: int) -> tuple[Size, Size, Size]:
    """Return the slots in a row of a contiguous cache, the blocks of a pool, and the pool's layers."""
    pool = inputs.get("past_key_value")
    if pool is None or pool.rank not in (5, 6):
        return -1, -1, -1
    if not block:
        return pool.shape[-2], -1, -1
    return -1, pool.shape[0], pool.shape[1] if pool.rank == 6 else 0


def _list_angle_sizes(settings: GptSettings, inputs: Mapping[str, Value]) -> list[Size]:
    """Return the numbers of positions of the cosine and sine tables, and the longest length for the first of two."""
    rotary = settings.rotary
    names = [] if rotary is None else [name for name in list_angle_tables(rotary, inputs) if name.endswith("cos_sin")]
    if rotary is None or not names:
        return [-1, -1, -1]
    positions = [prod(inputs[name].shape) // rotary.dim for name in names]
    return [*positions, rotary.original] if len(names) > 1 else [*positions, -1, -1]


def _find_input(inputs: Mapping[str, Value], name: str, *ranks: int) -> Value | None:
    value = inputs.get(name)
    return value if value is not None and value.rank in ranks else None
