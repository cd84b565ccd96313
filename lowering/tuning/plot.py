"""Pictures of a database: how the best of each task came down, and what the cost model was worth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .database import Trial, journal
from .ranks import rank_correlation
from .upkeep import parts

_LEAST = 4  # trials of a task that is drawn


def plot(folder: Path, path: Path) -> None:
    """Draws a database as PNG, a row for each architecture. Needs matplotlib. Raises DatabaseError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [(part.name, _by_task(journal(part))) for part in parts(folder)]
    figure, axes = pyplot.subplots(len(found), 3, figsize=(15, 4.2 * len(found)), squeeze=False, layout="constrained")
    for row, (name, tasks) in zip(axes, found):
        for number, trials in enumerate(tasks):
            best = best_so_far(trials)
            minutes = [(trial.at - trials[0].at) / 60 for trial in trials]
            row[0].step(range(1, len(best) + 1), best, where="post", label=f"{number}")
            row[1].step(minutes, best, where="post")
        correlations = []
        for trials in tasks:
            measured = [t for t in trials if t.seconds is not None]
            x, y = (
                np.array([t.predicted for t in measured]),
                np.log(np.array([t.seconds for t in measured], np.float64)),
            )
            row[2].scatter(x - x.mean(), y - y.mean(), s=6)
            correlations.append(rank_correlation(x, y))
        row[0].set(title=name, xlabel="trials", ylabel="best, times the default")
        row[1].set(xlabel="minutes", ylabel="best, times the default")
        mean = f"{np.nanmean(correlations):.2f}" if correlations else "-"
        row[2].set(title=f"rank correlation {mean}", xlabel="predicted (log)", ylabel="measured (log)")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def best_so_far(trials: Sequence[Trial]) -> list[float]:
    """After each trial, the fastest until then by the first, which is the default."""
    found: list[float] = []
    first = next(t.seconds for t in trials if t.seconds is not None)
    for trial in trials:
        now = 1.0 if trial.seconds is None else trial.seconds / first
        found.append(min([now, *found[-1:]]))
    return found


def _by_task(trials: Sequence[Trial]) -> list[list[Trial]]:
    found: dict[str, list[Trial]] = {}
    for trial in trials:
        found.setdefault(trial.task, []).append(trial)
    return [mine for mine in found.values() if sum(t.seconds is not None for t in mine) >= _LEAST]
