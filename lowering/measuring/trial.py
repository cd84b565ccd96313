"""A candidate's trial: checked and measured in a child of a helper process, and again if it looks fast."""

from __future__ import annotations

import dataclasses

from .isolated import Helper
from .measure import Job, Measurement, measure_job

RUN_SECONDS, RUN_MEMORY = 20.0, 4 << 30
"""The limits of a candidate."""

LAST_PAIRS = 40
"""Pairs of runs of a final comparison."""

CLEAR_WIN = 1.03
"""The speedup in a final comparison from which on a candidate replaces the default."""

_PROMISING_RATIO, _REPEAT_FACTOR = 0.98, 3


def runner() -> Helper:
    """Return the process for `try_candidate`."""
    return Helper([measure_job.__module__])


def try_candidate(helper: Helper, job: Job) -> Measurement:
    """Compare a candidate with the default, repeating promising results. Raises CandidateFailure."""
    measured = compare_candidate(helper, job)
    if measured.ratio < _PROMISING_RATIO:  # otherwise the luckiest of many candidates would win
        measured = compare_candidate(helper, dataclasses.replace(job, pairs=_REPEAT_FACTOR * job.pairs))
    return measured


def compare_candidate(helper: Helper, job: Job) -> Measurement:
    """Compare a candidate with the default once. Raises CandidateFailure."""
    # CUDA reserves addresses for the whole memory.
    return helper.call(measure_job, job, seconds=RUN_SECONDS, memory=None if job.gpu else RUN_MEMORY)


def is_win(ratio: float, spread: float) -> bool:
    """Return whether a final comparison is won, by the ratio to the default and its standard error."""
    return ratio + spread < 1 / CLEAR_WIN
