"""Functions that the tests run in processes of their own. The module imports little, as those processes import it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any


def returns(value: int, say: Callable[[str], None]) -> int:
    say("returning")
    return value + 1


def raises(say: Callable[[str], None]) -> None:
    say("raising")
    raise RuntimeError("no\nmore")


def crashes(say: Callable[[str], None]) -> None:
    say("crashing")
    os.abort()


def hangs(say: Callable[[str], None]) -> None:
    say("hanging")
    time.sleep(60)


def timed(seconds: float) -> dict[str, Any]:
    """Return the record that a contest makes of a contender whose results are right."""
    timing = {"median": seconds, "low": seconds / 2, "high": seconds * 2, "graph": True}
    return {"error": 1e-4, "timing": timing}
