"""The pools that a served decoder needs, of the sizes that a caller asks for, and the arrays that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import CachePool, Manifest, ServedCache
from .arguments import integer, numbers
from .blocks import Blocks
from .paged_cache import PagedKVCache
from .source_pool import RunsSetup, SourcePool


class Runs(Protocol):
    """What is asked of a compiled model."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def gpu(self) -> Any: ...

    @property
    def setup(self) -> RunsSetup | None: ...

    def run(self, inputs: Any) -> Any: ...

    def to_numpy(self, name: str, array: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class Pools:
    """What requests have parts of: blocks of the cache, slots of states, blocks of sources; and the arrays of all, by
    input, where the model runs."""

    cache: PagedKVCache | None
    slots: Blocks
    sources: SourcePool | None
    stores: dict[str, Any]


def pools_of(model: Runs, budget: int, blocks: int | None, state_slots: int | None, source_blocks: int | None) -> Pools:
    """The pools of a served model, of the sizes that are given, or of those that a call of `budget` tokens needs."""
    served = model.manifest.served
    assert served is not None
    cache = _cache_of(served, blocks)
    slots = _slots_of(served, state_slots, budget if blocks is None else min(budget, blocks))
    sources = _sources_of(None if served.sources is None else model.setup, served, source_blocks, blocks)
    stores: dict[str, Any] = _stores_of(served, cache, slots.total, sources)
    if model.gpu is not None:
        specs = {spec.name: spec for spec in model.manifest.inputs}
        stores = {name: model.gpu.zeros(specs[name], array.shape) for name, array in stores.items()}
    return Pools(cache, slots, sources, stores)


def _cache_of(served: ServedCache, blocks: int | None) -> PagedKVCache | None:
    """The cache, with the first pool; None for a decoder that has states alone."""
    if not served.pools:
        if blocks is not None:
            raise InputError(f"blocks is {blocks}, and the model keeps states and no cache: leave it out.")
        return None
    first = served.pools[0]
    return PagedKVCache(
        integer(blocks, "blocks", 1), served.tokens_per_block, layers=first.layers, kv_heads=first.kv_heads,
        head_dim=first.head_dim, dtype=served.dtype,
    )  # fmt: skip


def _slots_of(served: ServedCache, given: int | None, default: int) -> Blocks:
    """The slots of states, of which there are none where the decoder has no states."""
    if not served.states:
        if given is not None:
            raise InputError(f"state_slots is {given}, and the model keeps no states: leave it out.")
        return Blocks(0)
    return Blocks(default if given is None else integer(given, "state_slots", 1))


def _sources_of(
    setup: RunsSetup | None, served: ServedCache, given: int | None, default: int | None
) -> SourcePool | None:
    """The pools of sources, of which there are none where the decoder reads no encoder's output."""
    if served.sources is None:
        if given is not None:
            raise InputError(f"source_blocks is {given}, and the model reads no sources: leave it out.")
        return None
    assert setup is not None
    return SourcePool(setup, served, served.sources, integer(default if given is None else given, "source_blocks", 1))


def _stores_of(
    served: ServedCache, cache: PagedKVCache | None, slots: int, sources: SourcePool | None
) -> dict[str, np.ndarray]:
    """What the model writes, and its setup, by input: for one on a GPU the shapes of it, as the caches' own pools stay
    empty."""
    stores: dict[str, np.ndarray] = {}
    if cache is not None:
        stores |= _arrays_of(served, served.pools, cache)
    if sources is not None and served.sources is not None:
        stores |= _arrays_of(served, served.sources.pools, sources.cache)
    for states in served.states:
        dtype = np.dtype(getattr(ml_dtypes, states.dtype, states.dtype))
        stores[states.name] = np.zeros((slots, states.layers, *states.shape), dtype)
    return stores


def fixed_of(manifest: Manifest, served: ServedCache, given: Any) -> dict[str, np.ndarray]:
    """The arrays of inputs that are the same for all requests, in the types of these."""
    given = {} if given is None else given
    if not isinstance(given, Mapping) or given.keys() != set(served.fixed):
        what = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise InputError(f"`fixed` must have {', '.join(served.fixed) or 'no inputs'}, and not {what or 'none'}.")
    arrays = {}
    for spec in manifest.inputs:
        if spec.name in served.fixed:
            array = numbers(given[spec.name])
            if array is None or array.shape != spec.dims:
                what = type(given[spec.name]).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
                raise InputError(f"`fixed` has '{spec.name}' as {what}, and the model takes {spec}.")
            with np.errstate(over="ignore", invalid="ignore"):
                cast = array.astype(getattr(ml_dtypes, spec.dtype, spec.dtype))
            is_whole = cast.dtype.kind not in "iu" or (cast == array).all()
            if not is_whole or (np.isfinite(array) & ~np.isfinite(cast.astype(np.float64))).any():
                raise InputError(f"`fixed` has {array.tolist()} for '{spec.name}', which {spec.dtype} does not hold.")
            arrays[spec.name] = cast
    return arrays


def names_of(pools: tuple[CachePool, ...]) -> list[str]:
    """The inputs that hold the arrays of pools."""
    return [name for pool in pools for name in (pool.name, pool.scale) if name]


def _arrays_of(served: ServedCache, pools: tuple[CachePool, ...], cache: PagedKVCache) -> dict[str, np.ndarray]:
    """The arrays of pools with the blocks of a cache, of which the first is the cache's own."""
    arrays = {}
    for pool in pools:
        front = (len(cache.pool), pool.layers, 2, pool.kv_heads, served.tokens_per_block)
        arrays[pool.name] = cache.pool if pool is pools[0] else np.zeros((*front, pool.head_dim), cache.pool.dtype)
        if pool.scale:
            arrays[pool.scale] = np.zeros((*front, served.scales), np.float32)
    return arrays
