"""Rough cycle models of one core: the estimated cost of tiles before anything is measured.

They order a tuner's first candidates. Only differences between tiles of one problem count, so costs common to all tiles
are left out. A core does one vector FMA and one vector load per cycle.
"""

from __future__ import annotations

L1, L2 = 32 << 10, 512 << 10
"""Bytes of the nearest caches, of the smaller cores of today."""

LATENCY = 8
"""Cycles from one accumulation to the next in the same register, times the number of FMA units."""

L2_LINE = 2.0
"""Cycles for a cache line from the second-level cache."""

TYPICAL = 64
"""The size assumed for a symbolic one."""


def register_tile_cycles(rows: float, vectors: float) -> float:
    """Return the cycles of an outer-product step with `rows` rows of accumulators, `vectors` vectors each."""
    return max(rows * vectors, rows + vectors, LATENCY)


def padding_ratio(size: int, tile: int) -> float:
    """Return by which factor the tiles that cover a size exceed it."""
    return -(-size // tile) * tile / size if size else 1.0


def miss_ratio(used: float, cache: float) -> float:
    """Return the share of the used bytes that do not fit a cache."""
    return max(1.0 - cache / used, 0.0) if used else 0.0
