"""The instrument reports each planted fault by its kind, and a correct call as right."""

from __future__ import annotations

import pytest

from .plants import PLANTS
from .pool import FINDINGS, Zygote


def _attack_on_relu(zygote: Zygote) -> int:
    """Return a seed whose one call has elements."""
    for seed in range(20):
        (outcome,) = zygote.attack("", "Relu", seed)
        if outcome.kind == "right" and "float32" in outcome.what and "[0" not in outcome.what:
            return seed
    raise AssertionError("no attack on Relu has elements")


@pytest.fixture(scope="module")
def seed(zygote: Zygote) -> int:
    return _attack_on_relu(zygote)


@pytest.mark.parametrize("plant", PLANTS)
def test_plant_is_found(zygote: Zygote, seed: int, plant: str) -> None:
    outcomes = zygote.attack("", "Relu", seed, plant=plant, seconds=8)
    findings = [o for o in outcomes if o.kind in FINDINGS]
    assert [o.kind for o in findings] == [PLANTS[plant][1]], "\n".join(map(str, outcomes))
    assert findings[0].seed == seed


def test_attacks_repeat(zygote: Zygote) -> None:
    first, second = (zygote.attack("", "Gather", 3, 2) for _ in range(2))
    assert [str(o) for o in first] == [str(o) for o in second]


def test_attack_survives_no_other(zygote: Zygote, seed: int) -> None:
    """A death leaves the next attack as it was."""
    zygote.attack("", "Relu", seed, plant="death")
    (outcome,) = zygote.attack("", "Relu", seed)
    assert outcome.kind == "right"
