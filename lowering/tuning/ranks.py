"""How well an order that was expected is the one that was measured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tvm.s_tir import meta_schedule as ms

from .choices import recorded
from .task import has_kernel
from .tile_space import TileSpace

_LEAST = 4  # measurements that make an order


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's: 1 where both orders are the same, 0 where they have nothing to do with each other."""
    ranks = np.array([np.argsort(np.argsort(x)) for x in (a, b)], np.float64)
    with np.errstate(invalid="ignore"):
        return float(np.asarray(np.corrcoef(ranks))[0, 1])


def of_the_estimate(records: Iterable[ms.database.TuningRecord]) -> float | None:
    """The rank correlation of what was measured of one task with the analytic estimate of its tiles; None where there
    is too little to tell, where loops were searched, or where these versions of the kernels have no such tiles."""
    measured = {}
    for record in records:
        choice = recorded(record.trace)
        if choice is not None and record.run_secs:
            measured[choice] = float(record.run_secs[0])
            last = record
    if len(measured) < _LEAST or not has_kernel(last.workload.mod):
        return None
    space = TileSpace(last.workload.mod, last.target)
    try:
        expected = [space.estimate(space.read(choice)) for choice in measured]
    except (ValueError, TypeError):
        return None
    if np.ptp(expected) == 0:
        return None
    return rank_correlation(np.array(expected), np.array(list(measured.values())))
