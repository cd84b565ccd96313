"""Operators that move elements keep every bit of them, on CPUs, whatever the type: random models against NumPy."""

from __future__ import annotations

import pytest

import lowering
from tests.cases.mover_cases import TYPES
from tests.cases.random_movers import movers_of, random_model

TARGETS = ("cpu", "cpu:x86-64-v3")


@pytest.mark.sampled(21)
@pytest.mark.parametrize(("seed", "target"), [(seed, t) for seed in range(40) for t in TARGETS])
def test_random_models(seed: int, target: str) -> None:
    drawn = random_model(seed, 24)
    results = lowering.compile(drawn.proto(), target).run(drawn.arrays)
    assert drawn.wrong(results) == [], f"seed {seed}"


def test_every_type_is_moved_by_some() -> None:
    assert all(len(movers_of(dtype)) > 10 for dtype in TYPES)
