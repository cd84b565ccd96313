"""Operators that move elements keep every bit of them, on GPUs, whatever the type: random models against NumPy."""

from __future__ import annotations

import cuda_emulation as emulated
import pytest
from mover_cases import HALF, TYPES
from random_movers import random_model
from sampled import sampled

import lowering

ARCHITECTURES = ("sm_80", "sm_90a")


def wrong(seed: int, arch: str, count: int, dtypes: tuple[str, ...]) -> list[str]:
    drawn = random_model(seed, count, dtypes)
    return drawn.wrong(lowering.compile(drawn.proto(), f"cuda:{arch}").run(drawn.arrays))


@pytest.mark.parametrize(("seed", "arch"), sampled([(seed, a) for seed in range(12) for a in ARCHITECTURES], 13))
def test_random_models(seed: int, arch: str) -> None:
    dtypes = TYPES if seed % 2 else HALF
    assert emulated.run(wrong, seed, arch, 24, dtypes, arch=arch, timeout=500) == [], f"seed {seed}"
