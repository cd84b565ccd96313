"""Values of ticks along the axis of a chart."""

from __future__ import annotations

import math
from collections.abc import Iterator


def list_ticks(end: float, count: int) -> Iterator[int]:
    """Yield about `count` integers from 0 on, in steps of 1, 2 or 5 times a power of 10."""
    step = 10 ** math.floor(math.log10(max(end / count, 1)))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * count >= end)
    yield from range(0, math.floor(end) + 1, step)


def list_byte_ticks(end: float, count: int) -> Iterator[int]:
    """Yield about `count` numbers of bytes from 0 on, in steps of a power of 2."""
    step = 1 << max(math.ceil(math.log2(max(end / count, 1))), 0)
    yield from range(0, math.floor(end) + 1, step)


def list_decades(low: float, high: float) -> Iterator[float]:
    """Yield the powers of 10 from one at or below low to one at or above high."""
    yield from (10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1))
