"""A candidate's trial: checked and measured in a child of a helper process, and again where it looks fast."""

from __future__ import annotations

import dataclasses

from .isolated import Helper
from .measure import Job, Measured, measure

RUN_SECONDS, RUN_MEMORY = 20.0, 4 << 30
"""What a candidate may take."""

LAST_PAIRS = 40
"""Turns of a last comparison."""

CLEAR_WIN = 1.03
"""A candidate takes the default's place where it is so many times faster in a last comparison."""

_LOOK_AGAIN, _MORE = 0.98, 3


def runner() -> Helper:
    """The process for `tried`."""
    return Helper([measure.__module__])


def tried(helper: Helper, job: Job) -> Measured:
    """A candidate beside the default. Raises Failed."""
    measured = compared(helper, job)
    if measured.ratio < _LOOK_AGAIN:  # of many candidates the luckiest would win
        measured = compared(helper, dataclasses.replace(job, pairs=_MORE * job.pairs))
    return measured


def compared(helper: Helper, job: Job) -> Measured:
    """The same, once. Raises Failed."""
    # CUDA wants addresses for all the memory that there is.
    return helper.call(measure, job, seconds=RUN_SECONDS, memory=None if job.gpu else RUN_MEMORY)


def wins(ratio: float, spread: float) -> bool:
    """Whether a last comparison is won: its ratio to the default, and the standard error of that."""
    return ratio + spread < 1 / CLEAR_WIN
