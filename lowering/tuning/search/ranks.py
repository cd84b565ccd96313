"""Rank correlation of predicted and measured times."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tvm.s_tir import meta_schedule as ms

from ...tuning_records.candidate_choices import read_trace_choice
from ...tuning_records.task import has_kernel
from .tile_space import TileSpace

_MIN_MEASUREMENTS = 4  # fewest measurements for meaningful ranks


def compute_rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation: 1 for equal orders, 0 for unrelated ones."""
    ranks = np.array([np.argsort(np.argsort(x)) for x in (a, b)], np.float64)
    with np.errstate(invalid="ignore"):
        return float(np.asarray(np.corrcoef(ranks))[0, 1])


def compute_estimate_correlation(records: Iterable[ms.database.TuningRecord]) -> float | None:
    """Return the rank correlation of a task's measurements with the analytic estimate of its tiles.

    Returns None for too few measurements, for searched loops, and for tiles that these versions of the kernels do not
    have.
    """
    measured = {}
    for record in records:
        choice = read_trace_choice(record.trace)
        if choice is not None and record.run_secs:
            measured[choice] = float(record.run_secs[0])
            last = record
    if len(measured) < _MIN_MEASUREMENTS or not has_kernel(last.workload.mod):
        return None
    space = TileSpace(last.workload.mod, last.target)
    try:
        estimates = [space.estimate(space.read(choice)) for choice in measured]
    except (ValueError, TypeError):
        return None
    if np.ptp(estimates) == 0:
        return None
    return compute_rank_correlation(np.array(estimates), np.array(list(measured.values())))
