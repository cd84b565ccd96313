"""Reads and writes of a PagedKVCache through its tables, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from lowering.serving import PagedKVCache

HEADS, DIM = 2, 2
IDS = st.sampled_from([0, 1, -1, -2])  # the tuples (-1,) and (-2,) have equal hashes
ANY = st.integers(0, 9999)  # selects an existing item


def view_entries(cache: PagedKVCache) -> np.ndarray:
    """Return the pool as kernels with block_offsets address it: [entries, heads, tokens, elements]."""
    return cache.pool.reshape(-1, *cache.pool.shape[3:])


def view_slots(cache: PagedKVCache) -> np.ndarray:
    """Return the pool as kernels with first_slots address it: [slots, layers, 2, heads, elements]."""
    return np.moveaxis(cache.pool, 4, 1).reshape(-1, *cache.pool.shape[1:4], cache.pool.shape[5])


def write_values(cache: PagedKVCache, request: Any, start: int, values: np.ndarray) -> None:
    """Write like a kernel: values [tokens, layers, 2, heads, elements] at positions from `start` on."""
    entries = cache.block_offsets([request])[0, 0]
    for i, value in enumerate(values):
        column, offset = divmod(start + i, cache.tokens_per_block)
        for layer in range(cache.pool.shape[1]):
            for kind in range(2):
                view_entries(cache)[entries[kind, column] + 2 * layer, :, offset] = value[layer, kind]


def read_values(cache: PagedKVCache, request: Any) -> tuple[np.ndarray, np.ndarray]:
    """Read all tokens of a request by block_offsets, and by first_slots: [tokens, layers, 2, heads, elements] both."""
    positions = np.arange(cache.length(request))
    column, offset = positions // cache.tokens_per_block, positions % cache.tokens_per_block
    layers = 2 * np.arange(cache.pool.shape[1])
    entries = cache.block_offsets([request])[0, 0][:, column]  # [2, tokens]
    by_entry = view_entries(cache)[entries.T[:, None, :] + layers[:, None], :, offset[:, None, None]]
    by_slot = view_slots(cache)[cache.first_slots([request])[0, column] + offset]
    return by_entry, by_slot


def make_contents(cache: PagedKVCache, seeds: list[int]) -> np.ndarray:
    """Return values that differ by token, layer, kind and head."""
    shape = (cache.pool.shape[1], 2, HEADS, DIM)
    base = np.arange(np.prod(shape)).reshape(shape)
    values = np.array(seeds, np.float64).reshape(-1, 1, 1, 1, 1) * base.size + base
    assert (values < 2**24).all()
    return values.astype(cache.pool.dtype)


def count_columns(cache: PagedKVCache, tokens: int) -> int:
    return -(-tokens // cache.tokens_per_block)


def list_blocks(cache: PagedKVCache, request: Any, tokens: int) -> list[int]:
    """Return the blocks of a request's first tokens."""
    return (cache.first_slots([request])[0, : count_columns(cache, tokens)] // cache.tokens_per_block).tolist()


def snapshot_state(cache: PagedKVCache) -> Any:
    """Return all state that a refused call must not change."""
    requests = {
        name: (list(r.table), r.length, r.reserved, [p.tokens for p in r.prefixes], list(r.partial_ids))
        for name, r in cache._requests.items()
    }
    owners = [cache._blocks.count_owners(block) for block in range(cache._blocks.total)]
    return (
        requests,
        owners,
        list(cache._blocks._free),
        cache.usage(),
        cache.pool.tobytes(),
        snapshot_index(cache._prefixes.root),
    )


def snapshot_index(prefix: Any) -> Any:
    return len(prefix.holders), {tokens: snapshot_index(child) for tokens, child in prefix.children.items()}
