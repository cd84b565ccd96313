"""Cache updates with data for them, and what they should give: for the tests of every target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lowering.tensorir.scatter import CacheUpdate


@dataclass(frozen=True)
class Case:
    """An update and the sizes and indices of one call."""

    update: CacheUpdate
    dims: tuple[int, ...]
    length: int
    indices: tuple[int, ...]


def random_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements with any bit pattern, NaN payloads and negative zeros among them."""
    kind = np.dtype(dtype)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    return rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind).reshape(shape)


def random_rows(rng: np.random.Generator, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """A cache and an update of random bits."""
    rows = [*case.dims[: case.update.axis], case.length, *case.dims[case.update.axis + 1 :]]
    if case.update.rows_first:
        rows.insert(1, rows.pop(case.update.axis))
    return random_bits(rng, case.update.dtype, case.dims), random_bits(rng, case.update.dtype, tuple(rows))


def expected(case: Case, cache: np.ndarray, rows: np.ndarray) -> np.ndarray:
    update, present = case.update, cache.copy()
    if update.rows_first:
        rows = np.moveaxis(rows, 1, update.axis)
    for prefix in np.ndindex(cache.shape[: update.axis]):
        for s in range(case.length):
            position = (case.indices[prefix[0]] if update.indices else 0) + s
            if update.circular:
                position %= cache.shape[update.axis]
            if 0 <= position < cache.shape[update.axis]:
                present[(*prefix, position)] = rows[(*prefix, s)]
    return present


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
