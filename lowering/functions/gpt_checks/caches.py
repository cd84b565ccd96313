"""Checks of the caches of gpt_attention: the cache or pool of a layer, its block table, and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from .rows import QkvShape
from .settings import FP8, INT8, CallSettings
from .values import FLOAT32, INTEGERS, check_array, check_shape, refuse

_QUANTIZED_DTYPES = {INT8: np.dtype(np.int8), FP8: np.dtype(ml_dtypes.float8_e4m3fn)}


def check_cache(arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape) -> None:
    """Check the cache. Only the pool of the layer is checked."""
    if not settings.has_cache:
        return
    if settings.mode:
        for name in ("kv_orig_quant_scale", "kv_quant_orig_scale"):
            _check_scale(name, arguments[name], arguments["kv_cache_quant_mode"])
    offsets, pools = arguments["kv_cache_block_offsets"], arguments["host_kv_cache_pool_pointers"]
    cache = arguments["past_key_value"]
    if cache is None and pools is None:
        refuse(
            "gpt_attention.cache_missing",
            f"past_key_value{' and host_kv_cache_pool_pointers are' if offsets is not None else ' is'} missing",
            "give the cache, which the call reads and writes, or set use_cache to False",
        )
    if offsets is None:
        if pools is not None:
            refuse(
                "gpt_attention.block_table_missing",
                "host_kv_cache_pool_pointers is given without kv_cache_block_offsets",
                "give the table of blocks, or a contiguous cache as past_key_value",
            )
        _check_contiguous(cache, settings, rows)
        return
    if cache is not None and pools is not None:
        refuse(
            "gpt_attention.conflicting_caches",
            "past_key_value and host_kv_cache_pool_pointers are both given",
            "give the pools once",
        )
    _check_paged(arguments, settings, rows)


def _check_contiguous(value: Any, settings: CallSettings, rows: QkvShape) -> None:
    name, heads, size = "past_key_value", settings.kv_heads, settings.size
    if isinstance(value, np.ndarray) and value.ndim == 6:
        refuse(
            "gpt_attention.block_table_missing",
            f"{name} is a pool, of shape {value.shape}",
            "give kv_cache_block_offsets, or a contiguous cache",
        )
    cache = _check_writable(name, value, settings, rows)
    check_shape(
        name, cache, (cache.dtype,), ("rows", 2, heads, "slots", size), "with num_kv_heads and hidden_size_per_head"
    )
    needed = rows.requests * rows.beams
    if len(cache) < needed:
        refuse(
            "gpt_attention.row_count_too_small",
            f"{name} has {len(cache)} rows, and {rows.requests} requests of {rows.beams} beams need {needed}",
            "give a row for each beam of each request",
        )


def _check_paged(arguments: Mapping[str, Any], settings: CallSettings, rows: QkvShape) -> None:
    name, pools = "host_kv_cache_pool_pointers", arguments["host_kv_cache_pool_pointers"]
    if pools is None:
        name, pools = "past_key_value", arguments["past_key_value"]
        if isinstance(pools, np.ndarray):
            pools = [pools]
        if isinstance(pools, (list, tuple)) and len(pools) != 1:
            refuse(
                "gpt_attention.pool_count_unsupported",
                f"past_key_value contains {len(pools)} pools",
                "give several pools as host_kv_cache_pool_pointers",
            )
    if not isinstance(pools, (list, tuple)):
        refuse(
            "gpt_attention.pools_not_a_list",
            f"{name} is of type {type(pools).__name__}",
            "give a list of pools, which are NumPy arrays",
        )
    pool_index, layer = _find_pool(arguments["host_kv_cache_pool_mapping"], settings.layer, len(pools))
    if name == "host_kv_cache_pool_pointers":
        name = f"{name}[{pool_index}]"
    pool = _check_writable(name, pools[pool_index], settings, rows)
    leading = ("blocks", "layers") if pool.ndim == 6 else ("blocks",)
    reason = "with num_kv_heads and hidden_size_per_head"
    check_shape(name, pool, (pool.dtype,), (*leading, 2, settings.kv_heads, "tokens", settings.size), reason)
    tokens, layers = pool.shape[-2], pool.shape[1] if pool.ndim == 6 else 1
    if tokens < 1 or tokens & (tokens - 1):
        refuse(
            "gpt_attention.block_size_not_power_of_two",
            f"{name} has blocks of {tokens} tokens",
            "make their number of tokens a power of two",
        )
    if layer is None:
        layer = settings.layer if pool.ndim == 6 else 0
        if layer >= layers:
            refuse(
                "gpt_attention.layer_out_of_range",
                f"layer_idx is {layer}, and {name} has {layers} layers",
                "give a pool of all layers, or a mapping",
            )
    if layer >= layers:
        refuse(
            "gpt_attention.pool_mapping_out_of_range",
            f"host_kv_cache_pool_mapping says that layer_idx {settings.layer} is layer {layer} of {name}, which has "
            f"{layers}",
            "count layers of a pool from 0",
        )
    _check_offsets(arguments["kv_cache_block_offsets"], len(pools), pool_index, rows)


def _check_writable(name: str, value: Any, settings: CallSettings, rows: QkvShape) -> np.ndarray:
    """Return an array that the call may write, of the type that the mode requires."""
    dtype = _QUANTIZED_DTYPES.get(settings.mode, rows.dtype)
    if not isinstance(value, np.ndarray):
        refuse(
            "gpt_attention.array_required",
            f"{name} is of type {type(value).__name__}",
            "give a NumPy array, which the call writes to",
        )
    if value.dtype != dtype:
        refuse(
            "gpt_attention.cache_dtype_mismatch",
            f"{name} is an array of {value.dtype}, and kv_cache_quant_mode requires {dtype}",
            f"give such a cache, or set the mode to {INT8} for int8, {FP8} for float8_e4m3fn, 0 for the type of qkv",
        )
    if not value.flags.writeable:
        refuse(
            "gpt_attention.cache_read_only",
            f"{name} is read-only",
            "give an array that the call can write its keys and values to",
        )
    return value


def _find_pool(mapping: Any, layer: int, pools: int) -> tuple[int, int | None]:
    """Return the pool of a layer, and the index of the layer in the pool; None means layer_idx."""
    name = "host_kv_cache_pool_mapping"
    if mapping is None:
        if pools != 1:
            refuse(
                "gpt_attention.pool_mapping_missing",
                f"host_kv_cache_pool_pointers contains {pools} pools, and {name} is missing",
                "give the pool of each layer",
            )
        return 0, None
    check_shape(name, mapping, INTEGERS, ("layers", 2), "the pool of each layer and its index in the pool")
    if layer >= len(mapping):
        refuse(
            "gpt_attention.pool_mapping_too_short",
            f"{name} has {len(mapping)} layers, and layer_idx is {layer}",
            "give it a row for each layer",
        )
    index, layer_index = (int(value) for value in mapping[layer])
    if not 0 <= index < pools:
        refuse(
            "gpt_attention.pool_mapping_out_of_range",
            f"{name} says that layer_idx {layer} is in pool {index}, and there are {pools}",
            "count pools from 0",
        )
    if layer_index < 0:
        refuse(
            "gpt_attention.pool_mapping_out_of_range",
            f"{name} says that layer_idx {layer} is layer {layer_index} of pool {index}",
            "count layers from 0",
        )
    return index, layer_index


def _check_offsets(value: Any, pools: int, pool_index: int, rows: QkvShape) -> None:
    name = "kv_cache_block_offsets"
    offsets = check_array(name, value, INTEGERS)
    shape = (rows.requests, "beams", 2, "columns")
    if offsets.ndim == 4 and pools > 1:
        refuse(
            "gpt_attention.block_table_pools_missing",
            f"{name} has the shape {offsets.shape}, and there are {pools} pools",
            f"give a table for each, ({pools}, {', '.join(map(str, shape))})",
        )
    check_shape(
        name, offsets, INTEGERS, shape if offsets.ndim == 4 else (pools, *shape), "requests as in context_lengths"
    )
    layer_offsets = offsets if offsets.ndim == 4 else offsets[pool_index]
    if layer_offsets.shape[1] not in (1, rows.beams):
        refuse(
            "gpt_attention.block_table_beam_mismatch",
            f"{name} is for {layer_offsets.shape[1]} beams, and cache_indirection "
            f"{'is missing, which means one' if rows.beams == 1 else f'has {rows.beams}'}",
            "give the blocks of each beam, or of beam 0 alone to requests in the context phase",
        )


def _check_scale(name: str, value: Any, mode: Any) -> None:
    if value is None:
        refuse(
            "gpt_attention.scale_missing",
            f"{name} is missing, and kv_cache_quant_mode {mode} requires a quantized cache",
            "give an array of float32",
        )
    if check_array(name, value, FLOAT32).shape not in ((1,), (2,)):
        refuse(
            "gpt_attention.shape_mismatch",
            f"{name} has the shape {value.shape}",
            "give one number, of shape (1,), or one for K and one for V, of shape (2,)",
        )
