"""Rough models of one core, in cycles: what tiles should cost before anything is measured.

They order a tuner's first candidates, and only differences between tiles of one problem count: what all of them take is
left out. A core does one vector multiplication with addition and one vector load in a cycle.
"""

from __future__ import annotations

L1, L2 = 32 << 10, 512 << 10
"""Bytes of the nearest caches, of the smaller cores of today."""

LATENCY = 8
"""Cycles from a sum to the next one in the same register, times the units that add."""

L2_LINE = 2.0
"""Cycles for a cache line from the second-level cache."""

TYPICAL = 64
"""What a size that is not known is taken for."""


def register_tile(rows: float, vectors: float) -> float:
    """A step of an outer product with so many rows of sums, of so many vectors each."""
    return max(rows * vectors, rows + vectors, LATENCY)


def waste(size: int, tile: int) -> float:
    """By how much the tiles that cover a size are larger."""
    return -(-size // tile) * tile / size if size else 1.0


def overflow(used: float, cache: float) -> float:
    """The share of what is used that a cache does not hold."""
    return max(1.0 - cache / used, 0.0) if used else 0.0
