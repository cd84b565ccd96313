"""Operators that move elements keep every bit of them, on GPUs, whatever the type: random models against NumPy."""

from __future__ import annotations

import pytest

import lowering
from tests import cuda_emulation as emulated
from tests.cases.mover_cases import HALF, TYPES
from tests.cases.random_movers import random_model

ARCHITECTURES = ("sm_80", "sm_90a")


def wrong(seed: int, arch: str, count: int, dtypes: tuple[str, ...]) -> list[str]:
    drawn = random_model(seed, count, dtypes)
    return drawn.wrong(lowering.compile(drawn.proto(), f"cuda:{arch}").run(drawn.arrays))


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("seed", "arch"), [(seed, a) for seed in range(12) for a in ARCHITECTURES])
def test_random_models(seed: int, arch: str) -> None:
    dtypes = TYPES if seed % 2 else HALF
    assert emulated.run(wrong, seed, arch, 24, dtypes, arch=arch, timeout=500) == [], f"seed {seed}"
