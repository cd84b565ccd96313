"""Random requests of a call of PPL's operators: lengths, keys and values, their slots in the cache, and masks.

Elements of a mask that no request reads are NaN, and unused entries of a page table are indices out of range.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_NOWHERE = (-1, -7, -(2**31), -(2**62), 2**31, 2**40, 2**62)


def draw_requests(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Draw one to six requests: their rows and past tokens, [B], and the number of leading decoding requests."""
    batch = int(rng.integers(1, 7))

    def lengths(*ranges: tuple[int, int], p: Sequence[float]) -> np.ndarray:
        low, high = np.array(ranges)[rng.choice(len(ranges), batch, p=p)].T
        return rng.integers(low, high, endpoint=True)

    rows = lengths((0, 0), (1, 1), (2, 8), (9, 33), p=(0.05, 0.45, 0.35, 0.15))
    past = lengths((0, 0), (1, 8), (9, 40), (41, 140), p=(0.35, 0.3, 0.25, 0.1))
    decoding = int(rng.integers(0, batch + 1))
    if rng.random() < 0.5:  # usually; otherwise decoding requests have more rows
        rows[:decoding] = 1
    return rows, past, decoding


def draw_tokens(rng: np.random.Generator, shape: tuple[int, int, int], group: int) -> np.ndarray:
    """Draw keys or values, [N, heads, D]; some groups are zeros, some small numbers, and some ties.

    Small groups have the smallest scale, or in float16 a subnormal one. A group of ties has the scale 1/64, and numbers
    halfway between two quantized values.
    """
    normal = rng.standard_normal((*shape[:2], shape[2] // group, group))
    small = normal * 10.0 ** rng.uniform(-7, -1.5, normal.shape[:3])[..., None]
    ties = rng.integers(-254, 254, normal.shape, endpoint=True) / 128
    ties[..., 0] = 127 / 64
    kinds = [np.zeros_like(normal), small, ties, normal]
    kind = rng.choice(4, normal.shape[:3], p=(0.05, 0.1, 0.1, 0.75))[..., None]
    return np.choose(kind, kinds).reshape(shape)


def draw_regions(rng: np.random.Generator, keys: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw cachestarts, [B], and slots of requests: regions in any order, with gaps; illegal starts without keys."""
    starts, slots = rng.choice(_NOWHERE, len(keys)), [np.zeros(0, np.int64)] * len(keys)
    end = int(rng.integers(0, 4))
    for b in rng.permutation(len(keys)):
        if keys[b]:
            starts[b], slots[b] = end, end + np.arange(keys[b])
            end += int(keys[b] + rng.integers(0, 6))
    return starts, slots


def draw_pages(
    rng: np.random.Generator, past: np.ndarray, keys: np.ndarray, size: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw cachestarts, [B, MaxP], and the slots of requests: pages in any order, some unused, aligned to size or not.

    Requests may share first pages that the call only reads.
    """
    counts, batch = -(-keys // size), len(keys)
    total = int(counts.sum())
    gaps = rng.integers(0, 2, total) * (size if rng.random() < 0.75 else 3)
    pages = rng.permutation(np.cumsum(gaps + size) - size)
    table = rng.choice(_NOWHERE, (batch, max(1, counts.max()) + int(rng.integers(0, 3))))
    for b, own in enumerate(np.split(pages, np.cumsum(counts)[:-1])):
        table[b, : len(own)] = own
    if rng.random() < 0.3:
        first, second = rng.integers(0, batch, 2)
        common = min(past[first], past[second]) // size
        table[first, :common] = table[second, :common]
    positions = [np.arange(count) for count in keys]
    return table, [table[b, t // size] + t % size for b, t in enumerate(positions)]


def draw_mask(
    rng: np.random.Generator, kind: str, heads: int, rows: np.ndarray, keys: np.ndarray, dtype: str
) -> np.ndarray:
    """Draw attn_mask: [N, M], or [heads, N, M], or without elements. Elements of no request are NaN."""
    n, nk = int(rows.sum()), int(keys.sum())
    before = {"empty": None, "2-D": (), "3-D": (heads,)}[kind]
    if before is None:
        return np.zeros(0)
    if rng.random() < 0.1:
        return np.zeros((*before, n, 0))
    mask = np.full((*before, n, nk + int(rng.choice([0, -nk % 16, int(rng.integers(1, 8))]))), np.nan)
    for row, key, count, length in zip(np.cumsum(rows) - rows, np.cumsum(keys) - keys, rows, keys):
        own = rng.standard_normal((*before, count, length))
        hidden = rng.random(own.shape) < rng.choice([0.0, 0.3, 0.8])
        hidden |= rng.random((*own.shape[:-1], 1)) < 0.15  # whole rows
        # A lowest number may swallow the score that it is added to, depending on the type: a row needs a larger number.
        lowest = (rng.random(own.shape) < 0.05) & ~hidden[..., :1]
        lowest[..., :1] = False
        own = np.where(hidden, -np.inf, np.where(lowest, np.finfo(dtype).min, own))
        mask[..., row : row + count, key : key + length] = own
    return mask
