"""Slopes of ALiBi (arXiv:2108.12409): what a head adds to a score for each key between a row and a key."""

from __future__ import annotations

import numpy as np


def alibi_slopes(heads: int, some: range | None = None) -> np.ndarray:
    """float32, of some of so many heads, or of all: 2^(-8 (h + 1) / m) for the m heads up to the largest power of two,
    then the odd powers of the square root of the first of them."""
    most, h = 1 << (heads.bit_length() - 1), np.array(some or range(heads))
    powers = np.where(h < most, -8 * (h + 1) / most, -4 * (2 * (h - most) + 1) / most)
    return np.exp2(powers).astype(np.float32)
