"""Maintenance of databases: summarize, merge, prune, export and pack them."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm.s_tir import meta_schedule as ms

from ..tuning_records.candidate_choices import read_trace_choice
from ..tuning_records.database import (
    ARCHITECTURE,
    BEST,
    TRIALS,
    DatabaseError,
    TrialRecord,
    compress_records,
    hash_task,
    list_records,
    open_database,
    open_writable,
    read_journal,
    read_seconds,
    write_journal,
)
from ..tuning_records.shared_records import RECORDS, WORKLOADS, lock_folder
from ..tuning_records.task import is_current, read_shapes
from .search.ranks import compute_estimate_correlation


@dataclass(frozen=True)
class TaskSummary:
    """A task of a database: the shapes of its arguments, and seconds of default, fastest trial and winner.

    estimate is the rank correlation of the analytic estimate with the measurements (ranks.py).
    """

    architecture: str
    task: str
    shapes: tuple[tuple[int, ...] | int, ...]
    trials: int
    failures: dict[str, int]
    default: float
    fastest: float
    best: float | None
    estimate: float | None


def summarize_database(folder: Path) -> list[TaskSummary]:
    """Return the tasks of a database by architecture, the slowest first. Raises DatabaseError."""
    return [summary for path in list_architecture_folders(folder) for summary in _summarize_folder(path)]


def list_architecture_folders(folder: Path) -> list[Path]:
    """Return the folders of the architectures. Raises DatabaseError if there is none."""
    folders = sorted(path.parent for path in folder.glob(f"*/{ARCHITECTURE}")) if folder.is_dir() else []
    if not folders:
        raise DatabaseError(
            "database.folder_missing", f"'{folder}' does not contain a database. Name the folder of `tune --database`."
        )
    return folders


def merge_databases(sources: Sequence[Path], target: Path) -> None:
    """Add the records of databases to another one, which is created if it is missing.

    Seconds relate to a reference (database.py): for a task in both databases they are rescaled to the target's
    reference. Existing records are skipped. Raises DatabaseError.
    """
    for source in sources:
        for source_folder in list_architecture_folders(source):
            target_folder = target / source_folder.name
            for name in (TRIALS, BEST):
                (target_folder / name).mkdir(parents=True, exist_ok=True)
            if not (target_folder / ARCHITECTURE).exists():
                shutil.copy(source_folder / ARCHITECTURE, target_folder)
            with lock_folder(target_folder):
                scales = _compute_scales(open_database(source_folder / TRIALS), open_database(target_folder / TRIALS))
                for name in (TRIALS, BEST):
                    _add_new_records(open_database(source_folder / name), open_writable(target_folder / name), scales)
                existing = set(read_journal(target_folder))
                added = [
                    trial for trial in _rescale_trials(read_journal(source_folder), scales) if trial not in existing
                ]
                write_journal(target_folder, [*read_journal(target_folder), *added])


def prune_database(folder: Path, keep: int) -> int:
    """Remove all but the fastest trials of each task and the best records. Return the number removed.

    The journal stays, so that failed candidates are not tried again.
    """
    removed = 0
    for path in list_architecture_folders(folder):
        with lock_folder(path):
            removed += _prune_folder(path, keep)
    return removed


def _prune_folder(path: Path, keep: int) -> int:
    """Replace the trial records in one step. The workloads stay, since records refer to their numbers."""
    removed, trials, best = 0, open_database(path / TRIALS), open_database(path / BEST)
    with tempfile.TemporaryDirectory(prefix=f".{TRIALS}-", dir=path) as temporary:
        shutil.copy(path / TRIALS / WORKLOADS, temporary)
        (Path(temporary) / RECORDS).touch()
        pruned = open_writable(Path(temporary))
        for workload in _list_workloads(trials):
            best_choices = {read_trace_choice(record.trace) for record in list_records(best, workload.mod)}
            for rank, record in enumerate(list_records(trials, workload.mod)):
                if rank < keep or read_trace_choice(record.trace) in best_choices:
                    _commit_record(pruned, record, read_seconds(record))
                else:
                    removed += 1
        (Path(temporary) / RECORDS).replace(path / TRIALS / RECORDS)
    return removed


def export_best_records(folder: Path, target: Path) -> None:
    """Write a database of the best records only, which is all that `compile` reads. Raises DatabaseError."""
    for source_folder in list_architecture_folders(folder):
        target_folder = target / source_folder.name
        for name in (TRIALS, BEST):
            (target_folder / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(source_folder / ARCHITECTURE, target_folder)
        _add_new_records(open_database(source_folder / BEST), open_writable(target_folder / BEST), {})


def pack_presets(folder: Path, target: Path, min_gain: float) -> int:
    """Write the winners by at least that factor, and the defaults, compressed: presets for `compile`.

    Winners over outdated defaults are omitted. Returns the number of tasks. Raises DatabaseError, also for a folder
    that is not empty.
    """
    if target.exists() and any(target.iterdir()):
        raise DatabaseError(
            "argument.folder_not_empty", f"'{target}' is not empty. Name a new folder for the packed database."
        )
    tasks = 0
    for source_folder in list_architecture_folders(folder):
        best_records, target_folder = open_database(source_folder / BEST), target / source_folder.name
        compared = [
            records for w in _list_workloads(best_records) if len(records := list_records(best_records, w.mod)) > 1
        ]
        winners = [r for r in compared if _compute_gain(r) >= min_gain and is_current(r[0].workload.mod, r[0].target)]
        if not winners:
            continue
        (target_folder / BEST).mkdir(parents=True)
        shutil.copy(source_folder / ARCHITECTURE, target_folder)
        packed = open_writable(target_folder / BEST)
        for records in winners:
            for record in (records[0], records[-1]):
                _commit_record(packed, record, read_seconds(record))
        compress_records(target_folder)
        tasks += len(winners)
    return tasks


def _compute_gain(records: Sequence[ms.database.TuningRecord]) -> float:
    """Return the gain of the best records, the fastest first; the default is the slowest."""
    return read_seconds(records[-1]) / read_seconds(records[0])


def _summarize_folder(path: Path) -> list[TaskSummary]:
    trials, best = open_database(path / TRIALS), open_database(path / BEST)
    failures: dict[str, Counter[str]] = {}
    first: dict[str, float] = {}
    for trial in read_journal(path):
        if trial.cause is not None:
            failures.setdefault(trial.task, Counter())[trial.cause] += 1
        elif trial.seconds is not None:
            first.setdefault(trial.task, trial.seconds)
    summaries = []
    for workload in _list_workloads(trials):
        records = list_records(trials, workload.mod)
        times = [read_seconds(record) for record in records]
        name = hash_task(workload.mod)
        best_seconds = [read_seconds(record) for record in list_records(best, workload.mod)]
        causes = dict(failures.get(name, {}))
        default = first.get(name, max(times))
        best_time, estimate = min(best_seconds, default=None), compute_estimate_correlation(records)
        summaries.append(
            TaskSummary(
                path.name, name, read_shapes(workload.mod), len(times), causes, default, min(times), best_time, estimate
            )
        )
    return sorted(summaries, key=lambda s: -s.default)


def _list_workloads(database: ms.database.JSONDatabase) -> list[ms.database.Workload]:
    return list(dict.fromkeys(record.workload for record in database.get_all_tuning_records()))


def _compute_scales(source: ms.database.JSONDatabase, target: ms.database.JSONDatabase) -> dict[str, float]:
    """Return the target's seconds by the source's for each task: the median over the choices in both."""
    scales = {}
    for workload in _list_workloads(source):
        target_seconds, source_seconds = (
            {read_trace_choice(r.trace): read_seconds(r) for r in list_records(database, workload.mod)}
            for database in (target, source)
        )
        ratios = sorted(
            target_seconds[choice] / seconds for choice, seconds in source_seconds.items() if choice in target_seconds
        )
        if ratios:
            scales[hash_task(workload.mod)] = ratios[len(ratios) // 2]
    return scales


def _rescale_trials(trials: Iterable[TrialRecord], scales: Mapping[str, float]) -> list[TrialRecord]:
    return [t if t.seconds is None else replace(t, seconds=t.seconds * scales.get(t.task, 1.0)) for t in trials]


def _add_new_records(
    source: ms.database.JSONDatabase, target: ms.database.JSONDatabase, scales: Mapping[str, float]
) -> None:
    """Add the records whose choices the target does not have."""
    for workload in _list_workloads(source):
        existing = {read_trace_choice(record.trace) for record in list_records(target, workload.mod)}
        scale = scales.get(hash_task(workload.mod), 1.0)
        for record in list_records(source, workload.mod):
            if read_trace_choice(record.trace) not in existing:
                _commit_record(target, record, read_seconds(record) * scale)


def _commit_record(database: ms.database.JSONDatabase, record: ms.database.TuningRecord, seconds: float) -> None:
    workload = database.commit_workload(record.workload.mod)
    database.commit_tuning_record(
        ms.database.TuningRecord(record.trace, workload, [seconds], record.target, record.args_info)
    )
