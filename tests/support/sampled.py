"""Tests of which a sample runs, another one every ten commits, and all on request.

`pytest --sample N` names the sample; without it, N is a tenth of the number of commits of the checkout. The same number
gives the same cases.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return parameters for pytest of which one of `every` successive ones runs, and the others are slow.

    A case of several parameters is a tuple. Take a number that shares no factor with an inner loop, so that all its
    values are met.
    """
    first = int(os.environ.get(VARIABLE, "0")) % every
    listed = list(cases)
    first = first if first < len(listed) else 0
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if number % every == first else pytest.mark.slow,
        )
        for number, case in enumerate(listed)
    ]
