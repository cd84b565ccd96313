"""The cache update: inputs for a kernel, and whether it wrote the rows and nothing else.

A cache is [B, H, slots, D], updated along its slots; sizes.kv_len is the number of slots, q_len that of new rows.
"""

from __future__ import annotations

from typing import Any

from ..plan import Sizes
from .memory import Array, Memory

Arrays = dict[str, Array]


def draw(problem: Any, sizes: Sizes, memory: Memory, *, poison: bool) -> Arrays:
    """Draw fresh inputs by parameter name, `present` full of NaN; `before` is a copy of the cache. With poison,
    unwritten slots contain NaN."""
    _, heads, _, dim = problem.dims
    cache = memory.normal((sizes.batch, heads, sizes.kv_len, dim), problem.dtype)
    if poison:
        cache[:, :, ::3] = float("nan")
    return {
        "cache": cache,
        "update": memory.normal((sizes.batch, heads, sizes.q_len, dim), problem.dtype),
        "write_indices": memory.integers(sizes.lengths),
        "present": memory.full(cache.shape, float("nan"), problem.dtype),
        "before": memory.copy(cache),
    }


def expected(problem: Any, arrays: Arrays, memory: Memory) -> Array:
    """Return the cache with its new rows. Rows beyond the slots are dropped."""
    present, rows = memory.copy(arrays["before"]), arrays["update"].shape[2]
    for b, first in enumerate(arrays["write_indices"].tolist()):
        start, stop = max(first, 0), min(first + rows, present.shape[2])
        if start < stop:
            present[b, :, start:stop] = arrays["update"][b, :, start - first : stop - first]
    return present


def error(written: Array, right: Array, memory: Memory) -> float:
    """0 where every element is the same, NaN equal to NaN; else infinite."""
    same = (written == right) | ((written != written) & (right != right))
    return 0.0 if bool(same.all()) else float("inf")
