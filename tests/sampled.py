"""Tests of which some run always, and the others on request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Parameters for pytest of which each `every`-th runs always, beginning with the first; the others are slow. A case
    of several parameters is a tuple. Take a number that shares no factor with an inner loop, so that all its turns are
    met."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow if number % every else ())
        for number, case in enumerate(cases)
    ]
