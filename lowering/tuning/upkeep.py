"""What people do with databases: look at them, join them, and keep what matters."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm.s_tir import meta_schedule as ms

from .choices import recorded
from .database import (
    ARCHITECTURE,
    BEST,
    TRIALS,
    DatabaseError,
    Trial,
    identity,
    journal,
    open_database,
    opened,
    records_of,
    seconds_of,
    write_journal,
)
from .database import pack as pack_files
from .ranks import of_the_estimate
from .shared_records import RECORDS, WORKLOADS, locked
from .task import is_current, shapes_of


@dataclass(frozen=True)
class Summary:
    """A task of a database: the shapes of its arguments, and seconds of its default, fastest trial, and what won.

    estimate is the rank correlation of the analytic estimate with what was measured (ranks.py).
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


def show(folder: Path) -> list[Summary]:
    """The tasks of a database by architecture, those that took longest first. Raises DatabaseError."""
    return [summary for part in parts(folder) for summary in _summaries(part)]


def parts(folder: Path) -> list[Path]:
    """The folders of the architectures. Raises DatabaseError where there is none."""
    found = sorted(part.parent for part in folder.glob(f"*/{ARCHITECTURE}")) if folder.is_dir() else []
    if not found:
        raise DatabaseError(f"'{folder}' holds no database: the folder of `tune --database` is wanted.")
    return found


def merge(sources: Sequence[Path], target: Path) -> None:
    """Adds the records of databases to another one, which is made where it is missing.

    Seconds are those of a reference (database.py): of a task that both have they are rescaled to that of the target.
    Records that are there already are left out. Raises DatabaseError.
    """
    for source in sources:
        for part in parts(source):
            mine = target / part.name
            for name in (TRIALS, BEST):
                (mine / name).mkdir(parents=True, exist_ok=True)
            if not (mine / ARCHITECTURE).exists():
                shutil.copy(part / ARCHITECTURE, mine)
            with locked(mine):
                scales = _scales(open_database(part / TRIALS), open_database(mine / TRIALS))
                for name in (TRIALS, BEST):
                    _add(open_database(part / name), opened(mine / name), scales)
                known = set(journal(mine))
                new = [trial for trial in _rescaled(journal(part), scales) if trial not in known]
                write_journal(mine, [*journal(mine), *new])


def prune(folder: Path, keep: int) -> int:
    """Leaves of each task so many of the fastest trials, and the best records; answers with how many went.

    The journal stays, so that candidates that failed are not tried again.
    """
    gone = 0
    for part in parts(folder):
        with locked(part):
            gone += _prune(part, keep)
    return gone


def _prune(part: Path, keep: int) -> int:
    """Puts other records in place of those that are there, in one step; the workloads, which they number, stay."""
    gone, old, best = 0, open_database(part / TRIALS), open_database(part / BEST)
    with tempfile.TemporaryDirectory(prefix=f".{TRIALS}-", dir=part) as place:
        shutil.copy(part / TRIALS / WORKLOADS, place)
        (Path(place) / RECORDS).touch()
        new = opened(Path(place))
        for workload in _workloads(old):
            settled = {recorded(record.trace) for record in records_of(best, workload.mod)}
            for rank, record in enumerate(records_of(old, workload.mod)):
                if rank < keep or recorded(record.trace) in settled:
                    _commit(new, record, seconds_of(record))
                else:
                    gone += 1
        (Path(place) / RECORDS).replace(part / TRIALS / RECORDS)
    return gone


def export(folder: Path, target: Path) -> None:
    """A database of the best records alone: all that `compile` reads. Raises DatabaseError."""
    for part in parts(folder):
        mine = target / part.name
        for name in (TRIALS, BEST):
            (mine / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(part / ARCHITECTURE, mine)
        _add(open_database(part / BEST), opened(mine / BEST), {})


def pack(folder: Path, target: Path, least: float) -> int:
    """What won by at least that factor, with the defaults that it beat where they are those of today, compressed:
    presets for `compile`. Answers with how many tasks they are. Raises DatabaseError, also for a folder that holds
    something.
    """
    if target.exists() and any(target.iterdir()):
        raise DatabaseError(f"'{target}' is not empty: name a new folder to pack into.")
    tasks = 0
    for part in parts(folder):
        settled, mine = open_database(part / BEST), target / part.name
        both = [records for w in _workloads(settled) if len(records := records_of(settled, w.mod)) > 1]
        won = [r for r in both if _gain(r) >= least and is_current(r[0].workload.mod, r[0].target)]
        if not won:
            continue
        (mine / BEST).mkdir(parents=True)
        shutil.copy(part / ARCHITECTURE, mine)
        new = opened(mine / BEST)
        for records in won:
            for record in (records[0], records[-1]):
                _commit(new, record, seconds_of(record))
        pack_files(mine)
        tasks += len(won)
    return tasks


def _gain(records: Sequence[ms.database.TuningRecord]) -> float:
    """Of the best records, the fastest first; the default is the slowest."""
    return seconds_of(records[-1]) / seconds_of(records[0])


def _summaries(part: Path) -> list[Summary]:
    trials, best = open_database(part / TRIALS), open_database(part / BEST)
    failures: dict[str, Counter[str]] = {}
    first: dict[str, float] = {}
    for trial in journal(part):
        if trial.cause is not None:
            failures.setdefault(trial.task, Counter())[trial.cause] += 1
        elif trial.seconds is not None:
            first.setdefault(trial.task, trial.seconds)
    found = []
    for workload in _workloads(trials):
        records = records_of(trials, workload.mod)
        times = [seconds_of(record) for record in records]
        name = identity(workload.mod)
        won = [seconds_of(record) for record in records_of(best, workload.mod)]
        causes = dict(failures.get(name, {}))
        default = first.get(name, max(times))
        settled, estimate = min(won, default=None), of_the_estimate(records)
        found.append(
            Summary(
                part.name, name, shapes_of(workload.mod), len(times), causes, default, min(times), settled, estimate
            )
        )
    return sorted(found, key=lambda s: -s.default)


def _workloads(database: ms.database.JSONDatabase) -> list[ms.database.Workload]:
    return list(dict.fromkeys(record.workload for record in database.get_all_tuning_records()))


def _scales(source: ms.database.JSONDatabase, target: ms.database.JSONDatabase) -> dict[str, float]:
    """By task, the target's seconds by the source's: the median over the choices that both have measured."""
    found = {}
    for workload in _workloads(source):
        mine, theirs = (
            {recorded(r.trace): seconds_of(r) for r in records_of(database, workload.mod)}
            for database in (target, source)
        )
        both = sorted(mine[choice] / seconds for choice, seconds in theirs.items() if choice in mine)
        if both:
            found[identity(workload.mod)] = both[len(both) // 2]
    return found


def _rescaled(trials: Iterable[Trial], scales: Mapping[str, float]) -> list[Trial]:
    return [t if t.seconds is None else replace(t, seconds=t.seconds * scales.get(t.task, 1.0)) for t in trials]


def _add(source: ms.database.JSONDatabase, target: ms.database.JSONDatabase, scales: Mapping[str, float]) -> None:
    """Adds the records whose choices the target does not know."""
    for workload in _workloads(source):
        known = {recorded(record.trace) for record in records_of(target, workload.mod)}
        scale = scales.get(identity(workload.mod), 1.0)
        for record in records_of(source, workload.mod):
            if recorded(record.trace) not in known:
                _commit(target, record, seconds_of(record) * scale)


def _commit(database: ms.database.JSONDatabase, record: ms.database.TuningRecord, seconds: float) -> None:
    workload = database.commit_workload(record.workload.mod)
    database.commit_tuning_record(
        ms.database.TuningRecord(record.trace, workload, [seconds], record.target, record.args_info)
    )
