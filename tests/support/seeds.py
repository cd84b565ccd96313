"""New random cases for each run: `pytest --seed N`.

Tests seed their generators by fixed numbers, so that CI sees the same cases each time. With a seed of the run, every
generator that is seeded by a number becomes the one of that number and the run's: other cases, which the same `--seed`
brings back.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np

VARIABLE = "ONNX_LOWERING_TEST_SEED"
"""The seed of the run; processes inherit it."""

_DEFAULT_RNG, _RANDOM = np.random.default_rng, random.Random


def renew() -> None:
    """Make generators of this process depend on the run's seed, if it has one."""
    if not (seed := os.environ.get(VARIABLE)):
        return

    def default_rng(value: Any = None) -> np.random.Generator:
        is_number = isinstance(value, (int, np.integer, list, tuple))
        return _DEFAULT_RNG([*np.atleast_1d(value).tolist(), int(seed)] if is_number else value)

    class Random(_RANDOM):
        def __init__(self, value: Any = None) -> None:
            super().__init__(f"{value} {seed}" if isinstance(value, (int, str)) else value)

    np.random.default_rng = default_rng
    random.Random = Random  # type: ignore[misc]
