"""Tests of which a sample runs, another one every ten commits, and all on request.

Of the cases of a test with the marker `sampled(every)` one of `every` runs, and the others are slow. The option
`--sample N` names the sample; without it, N is a tenth of the number of commits of the checkout. The same number gives
the same cases.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

VARIABLE = "ONNX_LOWERING_TEST_SAMPLE"
"""The number of the sample; processes inherit it."""


def choose_sample() -> int:
    """Return a tenth of the number of commits of the checkout, 0 where git does not tell it."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return 0
    return int(result.stdout) // 10 if result.returncode == 0 else 0


def mark_others_as_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that the sample does not have as slow."""
    cases = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    for (_, every), of_test in cases.items():
        of_test.sort(key=_shuffle)  # else a sample has one value only of a parameter that has `every`
        first = _sample() % min(every, len(of_test))
        for item in of_test[:first] + [item for n, item in enumerate(of_test[first:]) if n % every]:
            item.add_marker(pytest.mark.slow)


def is_in_sample(item: pytest.Item, every: int) -> bool:
    """Return whether the sample has a test, if it has one of `every` tests."""
    return (_shuffle(item) + _sample()) % every == 0


def _shuffle(item: pytest.Item) -> int:
    """Return a number of a test that does not depend on other tests."""
    return zlib.crc32(item.nodeid.encode())


def _sample() -> int:
    return int(os.environ.get(VARIABLE, "0"))
