"""A call whose kernel is in memory costs little compared with the kernel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from timeit import repeat

import numpy as np
import pytest

from lowering import flex

pytestmark = pytest.mark.optimized

Q = np.ones((1, 2, 1, 16), "f")
BIAS = np.ones((2, 4), "f")


def time_call(call: Callable[[], object]) -> float:
    """Return the seconds of a call when nothing disturbs it."""
    return min(repeat(call, number=200, repeat=15)) / 200


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Workers would be waited for as long as other processes have their CPUs."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    yield
    os.sched_setaffinity(0, cpus)


def biased(s, b, h, i, j, *, bias):
    return s + bias[h, i]


def test_a_call_costs_what_a_few_additions_do() -> None:
    """A call takes as long as about 50 additions of tiny arrays; the limit is three times as many.

    The kernel takes a dozen of them, and `Model.run` some 25. Each call compares the mods and checks the arrays.
    """
    cap, combined = flex.mods.soft_cap(20.0), flex.and_masks(flex.masks.causal, flex.masks.sliding_window(3))
    block_mask = flex.create_block_mask(flex.masks.causal, None, None, 1, 1)
    addition = time_call(lambda: np.add(Q, Q))
    for options in (
        {},
        {"score_mod": cap, "mask_mod": flex.masks.causal},
        {"score_mod": biased, "captures": {"bias": BIAS}},
        {"mask_mod": combined, "return_lse": True},
        {"block_mask": block_mask},
    ):
        flex.flex_attention(Q, Q, Q, **options)
        before = flex.cache_info()
        assert time_call(lambda: flex.flex_attention(Q, Q, Q, **options)) < 150 * addition  # noqa: B023
        after = flex.cache_info()
        assert after.hits == before.hits + 3000 and after.misses == before.misses
