"""Slopes of ALiBi (arXiv:2108.12409): the bias of a head for each position between a row and a key."""

from __future__ import annotations

import numpy as np


def alibi_slopes(heads: int, selected_heads: range | None = None) -> np.ndarray:
    """Return the float32 slopes of selected heads of `heads`, or of all.

    They are 2^(-8 (h + 1) / m) for the m heads up to the largest power of two, then the odd powers of the square root
    of the first slope.
    """
    power, h = 1 << (heads.bit_length() - 1), np.array(selected_heads or range(heads))
    powers = np.where(h < power, -8 * (h + 1) / power, -4 * (2 * (h - power) + 1) / power)
    return np.exp2(powers).astype(np.float32)
