"""The caches of gpt_attention: shapes and types of the cache or pool of a layer, of its table of blocks, of scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from .rows import Rows
from .settings import FP8, INT8, Settings
from .values import FLOAT32, INTEGERS, array, refuse, shaped

_CODES = {INT8: np.dtype(np.int8), FP8: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class Cache:
    """Where the keys and values of a layer lie.

    A contiguous cache has `slots` in each row; a paged one has blocks of `block` tokens, found by `offsets`, a view
    (requests, beams, 2, columns) of kv_cache_block_offsets, whose entries are below `entries`.
    """

    slots: int
    block: int | None = None
    offsets: np.ndarray | None = None
    entries: int = 0


def cache_of(arguments: Mapping[str, Any], settings: Settings, rows: Rows) -> Cache | None:
    """None without a cache. Only the pool of the layer is looked at."""
    if not settings.cached:
        return None
    if settings.mode:
        for name in ("kv_orig_quant_scale", "kv_quant_orig_scale"):
            _scale(name, arguments[name], arguments["kv_cache_quant_mode"])
    offsets, pools = arguments["kv_cache_block_offsets"], arguments["host_kv_cache_pool_pointers"]
    given = arguments["past_key_value"]
    if given is None and pools is None:
        refuse(
            f"past_key_value{' and host_kv_cache_pool_pointers are' if offsets is not None else ' is'} missing",
            "give the cache, which the call reads and writes, or set use_cache to False",
        )
    if offsets is None:
        if pools is not None:
            refuse(
                "host_kv_cache_pool_pointers is given without kv_cache_block_offsets",
                "give the table of blocks, or a contiguous cache as past_key_value",
            )
        return _contiguous(given, settings, rows)
    if given is not None and pools is not None:
        refuse("past_key_value and host_kv_cache_pool_pointers are both given", "give the pools once")
    return _paged(arguments, settings, rows)


def _contiguous(given: Any, settings: Settings, rows: Rows) -> Cache:
    name, heads, size = "past_key_value", settings.kv_heads, settings.size
    if isinstance(given, np.ndarray) and given.ndim == 6:
        refuse(f"{name} is a pool, of shape {given.shape}", "give kv_cache_block_offsets, or a contiguous cache")
    cache = _stored(name, given, settings, rows)
    shaped(name, cache, (cache.dtype,), ("rows", 2, heads, "slots", size), "with num_kv_heads and hidden_size_per_head")
    needed = rows.requests * rows.beams
    if len(cache) < needed:
        refuse(
            f"{name} has {len(cache)} rows, and {rows.requests} requests of {rows.beams} beams need {needed}",
            "give a row for each beam of each request",
        )
    return Cache(slots=cache.shape[3])


def _paged(arguments: Mapping[str, Any], settings: Settings, rows: Rows) -> Cache:
    name, pools = "host_kv_cache_pool_pointers", arguments["host_kv_cache_pool_pointers"]
    if pools is None:
        name, pools = "past_key_value", arguments["past_key_value"]
        if isinstance(pools, np.ndarray):
            pools = [pools]
        if isinstance(pools, (list, tuple)) and len(pools) != 1:
            refuse(f"past_key_value holds {len(pools)} pools", "give several as host_kv_cache_pool_pointers")
    if not isinstance(pools, (list, tuple)):
        refuse(f"{name} is of type {type(pools).__name__}", "give a list of pools, which are NumPy arrays")
    which, layer = _mapped(arguments["host_kv_cache_pool_mapping"], settings.layer, len(pools))
    if name == "host_kv_cache_pool_pointers":
        name = f"{name}[{which}]"
    pool = _stored(name, pools[which], settings, rows)
    front = ("blocks", "layers") if pool.ndim == 6 else ("blocks",)
    why = "with num_kv_heads and hidden_size_per_head"
    shaped(name, pool, (pool.dtype,), (*front, 2, settings.kv_heads, "tokens", settings.size), why)
    tokens, layers = pool.shape[-2], pool.shape[1] if pool.ndim == 6 else 1
    if tokens < 1 or tokens & (tokens - 1):
        refuse(f"{name} has blocks of {tokens} tokens", "make it a power of two")
    if layer is None:
        layer = settings.layer if pool.ndim == 6 else 0
        if layer >= layers:
            refuse(f"layer_idx is {layer}, and {name} has {layers} layers", "give a pool of all layers, or a mapping")
    if layer >= layers:
        refuse(
            f"host_kv_cache_pool_mapping says that layer_idx {settings.layer} is layer {layer} of {name}, which has "
            f"{layers}",
            "count layers of a pool from 0",
        )
    offsets = _offsets(arguments["kv_cache_block_offsets"], len(pools), which, rows)
    return Cache(
        slots=offsets.shape[3] * tokens, block=tokens, offsets=offsets, entries=len(pool) * layers * 2 - 2 * layer
    )


def _stored(name: str, given: Any, settings: Settings, rows: Rows) -> np.ndarray:
    """An array that the call may write, in the type that the mode asks for."""
    dtype = _CODES.get(settings.mode, rows.dtype)
    if not isinstance(given, np.ndarray):
        refuse(f"{name} is of type {type(given).__name__}", "give a NumPy array, which the call writes to")
    if given.dtype != dtype:
        refuse(
            f"{name} is an array of {given.dtype}, and kv_cache_quant_mode asks for {dtype}",
            f"give such a cache, or set the mode to {INT8} for int8, {FP8} for float8_e4m3fn, 0 for the type of qkv",
        )
    if not given.flags.writeable:
        refuse(f"{name} is read-only", "give an array that the call can write its keys and values to")
    return given


def _mapped(mapping: Any, layer: int, pools: int) -> tuple[int, int | None]:
    """The pool of a layer, and which layer of the pool it is; None: what layer_idx says."""
    name = "host_kv_cache_pool_mapping"
    if mapping is None:
        if pools != 1:
            refuse(f"host_kv_cache_pool_pointers holds {pools} pools, and {name} is missing", "give it")
        return 0, None
    shaped(name, mapping, INTEGERS, ("layers", 2), "the pool of each layer and its place there")
    if layer >= len(mapping):
        refuse(f"{name} has {len(mapping)} layers, and layer_idx is {layer}", "give it a row for each layer")
    which, inside = (int(value) for value in mapping[layer])
    if not 0 <= which < pools:
        refuse(f"{name} says that layer_idx {layer} is in pool {which}, and there are {pools}", "count pools from 0")
    if inside < 0:
        refuse(f"{name} says that layer_idx {layer} is layer {inside} of pool {which}", "count layers from 0")
    return which, inside


def _offsets(given: Any, pools: int, which: int, rows: Rows) -> np.ndarray:
    name = "kv_cache_block_offsets"
    offsets = array(name, given, INTEGERS)
    shape = (rows.requests, "beams", 2, "columns")
    if offsets.ndim == 4 and pools > 1:
        refuse(
            f"{name} has the shape {offsets.shape}, and there are {pools} pools",
            f"give a table for each, ({pools}, {', '.join(map(str, shape))})",
        )
    shaped(name, offsets, INTEGERS, shape if offsets.ndim == 4 else (pools, *shape), "requests as in context_lengths")
    found = offsets if offsets.ndim == 4 else offsets[which]
    if found.shape[1] not in (1, rows.beams):
        refuse(
            f"{name} is for {found.shape[1]} beams, and cache_indirection "
            f"{'is missing, which means one' if rows.beams == 1 else f'has {rows.beams}'}",
            "give the blocks of each beam, or of beam 0 alone to requests in the context phase",
        )
    return found


def _scale(name: str, given: Any, mode: Any) -> None:
    if given is None:
        refuse(
            f"{name} is missing, and kv_cache_quant_mode {mode} asks for a quantized cache", "give an array of float32"
        )
    if array(name, given, FLOAT32).shape not in ((1,), (2,)):
        refuse(
            f"{name} has the shape {given.shape}",
            "give one number, of shape (1,), or one for K and one for V, of shape (2,)",
        )
