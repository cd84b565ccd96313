"""The score_mods and mask_mods of FlexAttention that are measured: one source for ours, PyTorch's and float64.

Captured arrays are named in each call, so that they travel as data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

DOCUMENT = 1300  # tokens
WINDOW = 1024
CAP = 30.0


@dataclass(frozen=True)
class Mods:
    """score(s, b, h, i, j, **captures) and mask(b, h, i, j, **captures); captures are names."""

    score: Callable[..., Any] | None
    mask: Callable[..., Any]
    captures: tuple[str, ...] = ()


def mods(tanh: Callable[[Any], Any]) -> dict[str, Mods]:
    """By name; tanh is that of the values which the mods get."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < WINDOW)

    def documents(b: Any, h: Any, i: Any, j: Any, *, documents: Any) -> Any:
        return (i >= j) & (documents[i] == documents[j])

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any, *, slopes: Any) -> Any:
        return s + slopes[h] * (j - i)

    def causal_with_slopes(b: Any, h: Any, i: Any, j: Any, *, slopes: Any) -> Any:
        return i >= j

    def capped(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CAP * tanh(s / CAP)

    return {
        "causal": Mods(None, causal),
        "window": Mods(None, window),
        "documents": Mods(None, documents, ("documents",)),
        "alibi": Mods(alibi, causal_with_slopes, ("slopes",)),
        "softcap": Mods(capped, causal),
    }


def captures(names: tuple[str, ...], tokens: int, heads: int) -> dict[str, np.ndarray]:
    """The captured arrays of those names."""
    arrays = {
        "documents": (np.arange(tokens) // DOCUMENT).astype(np.int32),
        "slopes": np.exp2(-np.arange(1, heads + 1) / 2).astype(np.float32),
    }
    return {name: arrays[name] for name in names}
