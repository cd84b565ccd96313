"""What a PagedKVCache holds, read and written through its tables, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from lowering.serving import PagedKVCache

HEADS, DIM = 2, 2
IDS = st.sampled_from([0, 1, -1, -2])  # the tuples (-1,) and (-2,) have equal hashes
ANY = st.integers(0, 9999)  # which one of those that there are


def rows(cache: PagedKVCache) -> np.ndarray:
    """The pool as kernels with block_offsets address it: [entries, heads, tokens, elements]."""
    return cache.pool.reshape(-1, *cache.pool.shape[3:])


def slots(cache: PagedKVCache) -> np.ndarray:
    """The pool as kernels with first_slots address it: [slots, layers, 2, heads, elements]."""
    return np.moveaxis(cache.pool, 4, 1).reshape(-1, *cache.pool.shape[1:4], cache.pool.shape[5])


def write(cache: PagedKVCache, request: Any, start: int, values: np.ndarray) -> None:
    """What a kernel does: values [tokens, layers, 2, heads, elements] at positions from `start` on."""
    entries = cache.block_offsets([request])[0, 0]
    for i, value in enumerate(values):
        column, place = divmod(start + i, cache.tokens_per_block)
        for layer in range(cache.pool.shape[1]):
            for kind in range(2):
                rows(cache)[entries[kind, column] + 2 * layer, :, place] = value[layer, kind]


def read(cache: PagedKVCache, request: Any) -> tuple[np.ndarray, np.ndarray]:
    """All tokens of a request by block_offsets, and by first_slots: [tokens, layers, 2, heads, elements] both."""
    at = np.arange(cache.length(request))
    column, place = at // cache.tokens_per_block, at % cache.tokens_per_block
    layers = 2 * np.arange(cache.pool.shape[1])
    entries = cache.block_offsets([request])[0, 0][:, column]  # [2, tokens]
    by_entry = rows(cache)[entries.T[:, None, :] + layers[:, None], :, place[:, None, None]]
    by_slot = slots(cache)[cache.first_slots([request])[0, column] + place]
    return by_entry, by_slot


def contents(cache: PagedKVCache, seeds: list[int]) -> np.ndarray:
    """Values that tell which token, layer, kind and head they are of."""
    shape = (cache.pool.shape[1], 2, HEADS, DIM)
    one = np.arange(np.prod(shape)).reshape(shape)
    values = np.array(seeds, np.float64).reshape(-1, 1, 1, 1, 1) * one.size + one
    assert (values < 2**24).all()
    return values.astype(cache.pool.dtype)


def columns(cache: PagedKVCache, tokens: int) -> int:
    return -(-tokens // cache.tokens_per_block)


def blocks(cache: PagedKVCache, request: Any, tokens: int) -> list[int]:
    """The blocks of a request's first tokens."""
    return (cache.first_slots([request])[0, : columns(cache, tokens)] // cache.tokens_per_block).tolist()


def everything(cache: PagedKVCache) -> Any:
    """What no refused call may change."""
    requests = {
        name: (list(r.table), r.length, r.reserved, [p.tokens for p in r.prefixes], list(r.partial_ids))
        for name, r in cache._requests.items()
    }
    owners = [cache._blocks.count_owners(block) for block in range(cache._blocks.total)]
    return requests, owners, list(cache._blocks._free), cache.usage(), cache.pool.tobytes(), index(cache._root)


def index(prefix: Any) -> Any:
    return len(prefix.holders), {tokens: index(child) for tokens, child in prefix.children.items()}
