"""Slopes of ALiBi (arXiv:2108.12409): the bias is slope * (position of the key - position of the query row)."""

from __future__ import annotations

import numpy as np


def alibi_slopes(heads: int, selected_heads: range | None = None) -> np.ndarray:
    """Return the float32 slopes of selected heads of `heads`, or of all.

    m is the largest power of two that is at most `heads`. Head h < m has the slope 2^(-8 (h + 1) / m), head h >= m the
    slope 2^(-4 (2 (h - m) + 1) / m).
    """
    m, h = 1 << (heads.bit_length() - 1), np.array(selected_heads or range(heads))
    exponents = np.where(h < m, -8 * (h + 1) / m, -4 * (2 * (h - m) + 1) / m)
    return np.exp2(exponents).astype(np.float32)
