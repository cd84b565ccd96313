"""`benchmarks` is a package of the checkout, behind all that is installed; random numbers of a test are its own."""

import gc
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1]))
from benchmarks.in_process import provide
from lowering.compiling import artifact_cache

provide()

# What a test compiles is compiled, whatever was compiled before: its GPU may be emulated, or a pass replaced.
_KEY = artifact_cache.key
pytest.MonkeyPatch().setattr(artifact_cache, "key", lambda *_: None)


@pytest.fixture
def artifacts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for users."""
    monkeypatch.setattr(artifact_cache, "key", _KEY)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """A module's generator, RNG, begins each test anew, so that a test draws the same alone and among others."""
    if hasattr(request.module, "RNG"):
        seed = zlib.crc32(request.node.name.encode())
        print(f"RNG: default_rng({seed})")  # which pytest shows where the test fails
        request.module.RNG = np.random.default_rng(seed)


DEAR = ("tuning", "packaging", "serving")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with dear fixtures come first: towards the end workers take tests from each other, and what two of them
    have of one module, both make fixtures for."""
    items.sort(key=lambda item: item.path.parent.name not in DEAR)


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage again and again takes a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
