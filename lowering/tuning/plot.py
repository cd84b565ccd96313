"""Plots of a database: the best of each task over time, and the quality of the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..tuning_records.database import TrialRecord, read_journal
from .search.ranks import compute_rank_correlation
from .upkeep import list_architecture_folders

_MIN_TRIALS = 4  # smallest number of trials of a task to draw


def plot_database(folder: Path, path: Path) -> None:
    """Draw a database as PNG, with a row for each architecture. Needs matplotlib. Raises DatabaseError."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trials_by_folder = [(own.name, _group_by_task(read_journal(own))) for own in list_architecture_folders(folder)]
    figure, axes = pyplot.subplots(
        len(trials_by_folder), 3, figsize=(15, 4.2 * len(trials_by_folder)), squeeze=False, layout="constrained"
    )
    for row, (name, tasks) in zip(axes, trials_by_folder):
        for number, trials in enumerate(tasks):
            best = compute_best_so_far(trials)
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
            correlations.append(compute_rank_correlation(x, y))
        row[0].set(title=name, xlabel="trials", ylabel="best, times the default")
        row[1].set(xlabel="minutes", ylabel="best, times the default")
        mean = f"{np.nanmean(correlations):.2f}" if correlations else "-"
        row[2].set(title=f"rank correlation {mean}", xlabel="predicted (log)", ylabel="measured (log)")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def compute_best_so_far(trials: Sequence[TrialRecord]) -> list[float]:
    """Return, after each trial, the fastest time so far relative to the first, which is the default's."""
    best: list[float] = []
    first = next(t.seconds for t in trials if t.seconds is not None)
    for trial in trials:
        ratio = 1.0 if trial.seconds is None else trial.seconds / first
        best.append(min([ratio, *best[-1:]]))
    return best


def _group_by_task(trials: Sequence[TrialRecord]) -> list[list[TrialRecord]]:
    trials_by_task: dict[str, list[TrialRecord]] = {}
    for trial in trials:
        trials_by_task.setdefault(trial.task, []).append(trial)
    return [
        task_trials
        for task_trials in trials_by_task.values()
        if sum(t.seconds is not None for t in task_trials) >= _MIN_TRIALS
    ]
