"""The pools of a served decoder, of requested sizes, and the arrays that they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ..errors import InputError
from ..manifest import CachePool, Manifest, ServedCache
from .arguments import check_integer, read_numbers
from .blocks import BlockPool
from .paged_cache import PagedKVCache
from .source_pool import SetupModel, SourcePool


class ServedModel(Protocol):
    """The interface of a compiled model."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def gpu(self) -> Any: ...

    @property
    def setup(self) -> SetupModel | None: ...

    def run(self, inputs: Any) -> Any: ...

    def to_numpy(self, name: str, array: Any) -> np.ndarray: ...


@dataclass(frozen=True)
class ServingPools:
    """The resources of requests: blocks of the cache, slots of states, blocks of sources.

    arrays are the arrays of all pools by input, on the device that runs the model.
    """

    cache: PagedKVCache | None
    slots: BlockPool
    sources: SourcePool | None
    arrays: dict[str, Any]


def create_pools(
    model: ServedModel, token_budget: int, blocks: int | None, state_slots: int | None, source_blocks: int | None
) -> ServingPools:
    """Create the pools of a served model, of the requested sizes.

    Default sizes are those for a call of `token_budget` tokens.
    """
    served = model.manifest.served
    assert served is not None
    cache = _create_cache(served, blocks)
    slots = _create_slots(served, state_slots, token_budget if blocks is None else min(token_budget, blocks))
    sources = _create_source_pool(None if served.sources is None else model.setup, served, source_blocks, blocks)
    arrays: dict[str, Any] = _create_arrays(served, cache, slots.total, sources)
    if model.gpu is not None:
        specs = {spec.name: spec for spec in model.manifest.inputs}
        arrays = {name: model.gpu.zeros(specs[name], array.shape) for name, array in arrays.items()}
    return ServingPools(cache, slots, sources, arrays)


def _create_cache(served: ServedCache, blocks: int | None) -> PagedKVCache | None:
    """Return the cache with the first pool, or None for a decoder that has states only."""
    if not served.pools:
        if blocks is not None:
            raise InputError(
                "batcher.blocks_unused", f"blocks is {blocks}, and the model has states but no cache: leave it out."
            )
        return None
    first = served.pools[0]
    return PagedKVCache(
        check_integer(blocks, "blocks", 1), served.tokens_per_block, layers=first.layers, kv_heads=first.kv_heads,
        head_dim=first.head_dim, dtype=served.dtype,
    )  # fmt: skip


def _create_slots(served: ServedCache, requested: int | None, default: int) -> BlockPool:
    """Return the slots of states, of which a decoder without states needs none."""
    if not served.states:
        if requested is not None:
            raise InputError(
                "batcher.state_slots_unused", f"state_slots is {requested}, and the model has no states: leave it out."
            )
        return BlockPool(0)
    return BlockPool(default if requested is None else check_integer(requested, "state_slots", 1))


def _create_source_pool(
    setup: SetupModel | None, served: ServedCache, requested: int | None, default: int | None
) -> SourcePool | None:
    """Return the pool of sources, or None if the decoder does not read an encoder's output."""
    if served.sources is None:
        if requested is not None:
            raise InputError(
                "batcher.source_blocks_unused",
                f"source_blocks is {requested}, and the model reads no sources: leave it out.",
            )
        return None
    assert setup is not None
    return SourcePool(
        setup, served, served.sources, check_integer(default if requested is None else requested, "source_blocks", 1)
    )


def _create_arrays(
    served: ServedCache, cache: PagedKVCache | None, slots: int, sources: SourcePool | None
) -> dict[str, np.ndarray]:
    """Return the arrays that the model and its setup write, by input.

    For a model on a GPU only their shapes are used, and the caches' own pools stay unused.
    """
    arrays: dict[str, np.ndarray] = {}
    if cache is not None:
        arrays |= _create_pool_arrays(served, served.pools, cache)
    if sources is not None and served.sources is not None:
        arrays |= _create_pool_arrays(served, served.sources.pools, sources.cache)
    for states in served.states:
        dtype = np.dtype(getattr(ml_dtypes, states.dtype, states.dtype))
        arrays[states.name] = np.zeros((slots, states.layers, *states.shape), dtype)
    return arrays


def read_fixed_inputs(manifest: Manifest, served: ServedCache, fixed: Any) -> dict[str, np.ndarray]:
    """Return the arrays of inputs that are equal for all requests, in the types of these inputs."""
    fixed = {} if fixed is None else fixed
    if not isinstance(fixed, Mapping) or fixed.keys() != set(served.fixed):
        text = ", ".join(map(str, fixed)) if isinstance(fixed, Mapping) else type(fixed).__name__
        raise InputError(
            "batcher.fixed_names_mismatch",
            f"`fixed` must contain {', '.join(served.fixed) or 'no inputs'}, not {text or 'none'}.",
        )
    arrays = {}
    for spec in manifest.inputs:
        if spec.name in served.fixed:
            array = read_numbers(fixed[spec.name])
            if array is None or array.shape != spec.dims:
                text = type(fixed[spec.name]).__name__ if array is None else f"{array.dtype}{list(array.shape)}"
                raise InputError(
                    "batcher.fixed_shape_mismatch", f"`fixed` has '{spec.name}' as {text}, and the model takes {spec}."
                )
            with np.errstate(over="ignore", invalid="ignore"):
                cast = array.astype(getattr(ml_dtypes, spec.dtype, spec.dtype))
            is_whole = cast.dtype.kind not in "iu" or (cast == array).all()
            if not is_whole or (np.isfinite(array) & ~np.isfinite(cast.astype(np.float64))).any():
                raise InputError(
                    "batcher.fixed_value_out_of_range",
                    f"`fixed` has {array.tolist()} for '{spec.name}', which {spec.dtype} cannot represent.",
                )
            arrays[spec.name] = cast
    return arrays


def list_pool_inputs(pools: tuple[CachePool, ...]) -> list[str]:
    """Return the names of the inputs for the arrays of pools."""
    return [name for pool in pools for name in (pool.name, pool.scale) if name]


def _create_pool_arrays(
    served: ServedCache, pools: tuple[CachePool, ...], cache: PagedKVCache
) -> dict[str, np.ndarray]:
    """Return the arrays of pools with the blocks of a cache. The first one is the cache's own."""
    arrays = {}
    for pool in pools:
        dims = (len(cache.pool), pool.layers, 2, pool.kv_heads, served.tokens_per_block)
        arrays[pool.name] = cache.pool if pool is pools[0] else np.zeros((*dims, pool.head_dim), cache.pool.dtype)
        if pool.scale:
            arrays[pool.scale] = np.zeros((*dims, served.scales), np.float32)
    return arrays
