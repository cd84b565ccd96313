"""Databases: a folder for each architecture, with two of MetaSchedule's own JSON databases in it.

    DIR/<architecture>/architecture.json    what it is, in full
                      /trials/              everything that was measured, each line written when it was
                      /best/                what won a last comparison, and the defaults
                      /journal.jsonl        every trial in order: when, what was predicted, what came of it

A record applies to a function that is the same as its own, on the same architecture, by kernels of the same versions.
Its seconds are the time of the default when the task was first measured, by the ratio that was measured since: so
records of all sessions compare, and the fastest is the best. Both databases only grow, so that a killed writer loses a
line at most.
"""

from __future__ import annotations

import json
import lzma
import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import tvm
from tvm.s_tir import Trace
from tvm.s_tir import meta_schedule as ms
from tvm_ffi import structural_hash

from ..errors import ArtifactError
from ..measuring.isolated import Failed
from ..measuring.lines import append_line, repair_lines, whole_lines
from ..measuring.machine import Machine, machine
from ..records import decode
from ..target import Target
from .architecture import Architecture, architecture
from .choices import recorded
from .record_lines import DatabaseError as DatabaseError
from .shared_records import RECORDS, WORKLOADS, SharedRecords, locked
from .shared_records import opened as opened

TRIALS, BEST = "trials", "best"
_PACKED = ".xz"
ARCHITECTURE, _JOURNAL = "architecture.json", "journal.jsonl"


@dataclass(frozen=True)
class Trial:
    """What came of a candidate: its task by hash, its choice as text, its seconds, or why it is never chosen.

    predicted is the logarithm of the time that the cost model expected, up to a constant of the task; at is Unix time.
    """

    task: str
    candidate: str
    seconds: float | None
    predicted: float
    at: float
    cause: str | None = None
    text: str = ""


class Database:
    """The part of a database for one architecture; it is made where it is missing."""

    def __init__(self, folder: Path, target: Target, measured_on: Machine | None = None) -> None:
        """measured_on is the machine that measures, where it is not this one."""
        self.architecture = architecture(target, measured_on)
        self.folder = folder / self.architecture.name
        try:
            for name in (TRIALS, BEST):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            path = self.folder / ARCHITECTURE
            if not path.exists():
                _replace(path, self.architecture.to_json())
        except OSError as error:
            raise DatabaseError(f"'{self.folder}' cannot be written: {error.strerror or error}.") from error
        with locked(self.folder):
            repair_lines(self.folder / _JOURNAL)
            self._trials, self._best = (SharedRecords(self.folder / name) for name in (TRIALS, BEST))
        self._failures = [trial for trial in journal(self.folder) if trial.cause is not None]

    @property
    def trials(self) -> ms.database.MemoryDatabase:
        """What was measured before this process began, and by itself."""
        return self._trials.known

    def commit(
        self,
        task: tvm.IRModule,
        trace: Trace,
        seconds: float,
        target: tvm.target.Target,
        predicted: float = 0.0,
    ) -> None:
        """Appends what was measured."""
        self._note(Trial(identity(task), recorded(trace) or "", seconds, predicted, time.time()))
        with locked(self.folder):
            self._trials.commit(task, trace, seconds, target)

    def fail(self, task: tvm.IRModule, candidate: str, failed: Failed, predicted: float = 0.0) -> Trial:
        """Appends what failed."""
        trial = Trial(identity(task), candidate, None, predicted, time.time(), failed.cause, failed.text)
        self._failures.append(trial)
        self._note(trial)
        return trial

    def _note(self, trial: Trial) -> None:
        with locked(self.folder):
            repair_lines(self.folder / _JOURNAL)  # another process may have been killed since
            append_line(self.folder / _JOURNAL, asdict(trial))

    def known(self, task: tvm.IRModule) -> dict[str, float]:
        """Seconds of the choices that were measured for a task."""
        found: dict[str, float] = {}
        for record in records_of(self.trials, task):
            text = recorded(record.trace)
            if text is not None:
                found.setdefault(text, seconds_of(record))
        return found

    def traces(self, task: tvm.IRModule) -> dict[str, Trace]:
        """By choice, of what was measured."""
        records = records_of(self.trials, task)
        return {text: r.trace for r in records if (text := recorded(r.trace)) is not None}

    def failed(self, task: tvm.IRModule) -> dict[str, Trial]:
        """By candidate."""
        name = identity(task)
        return {failure.candidate: failure for failure in self._failures if failure.task == name}

    def record_best(self, task: tvm.IRModule, trace: Trace, seconds: float, target: tvm.target.Target) -> None:
        """Appends the default, and what won a last comparison with it. Of several the fastest counts."""
        with locked(self.folder):
            self._best.commit(task, trace, seconds, target)

    def best_record(self, task: tvm.IRModule) -> ms.database.TuningRecord | None:
        """The fastest of these."""
        return next(iter(records_of(self._best.known, task)), None)


def identity(task: tvm.IRModule) -> str:
    """The hash of a task's module."""
    return f"{structural_hash(task) & (2**64 - 1):016x}"


def records_of(database: ms.database.Database, task: tvm.IRModule) -> list[ms.database.TuningRecord]:
    """What was measured of a task, the fastest first. MetaSchedule's own answer leaves out what drew no samples."""
    if not database.has_workload(task):
        return []
    workload = database.commit_workload(task)
    records = [r for r in database.get_all_tuning_records() if r.run_secs and r.workload.same_as(workload)]
    return sorted(records, key=seconds_of)


def seconds_of(record: ms.database.TuningRecord) -> float:
    return float(record.run_secs[0])


def parts_for(folder: Path, target: Target) -> list[Path]:
    """The folders of a database whose records apply to a target: of this CPU its own; of targets that do not say which
    machine they are for, GPUs among them, those of all machines that measured such code, this one's first.
    """
    own = architecture(target)
    if own.caches:
        return [folder / own.name]
    try:
        here = architecture(target, machine(gpu=bool(target.architecture)))
    except ArtifactError:  # no GPU
        here = own
    found = [part for part, its in _parts(folder) if its.is_for_code_of(own)]
    return sorted(found, key=lambda part: part.name != here.name)


def parts_like(folder: Path, own: Architecture) -> list[Path]:
    """The folders of CPUs that are like one (Architecture.is_like)."""
    return [part for part, its in _parts(folder) if own.is_like(its)]


def last_measured_on(folder: Path, target: Target) -> Machine | None:
    """The machine of which a database knows the latest measurements of such code; None where there are none."""
    own = architecture(target)
    found = [
        ((part / _JOURNAL).stat().st_mtime, Machine(its.caches, its.card))
        for part, its in _parts(folder)
        if its.is_for_code_of(own) and (part / _JOURNAL).exists()
    ]
    return max(found, key=lambda each: each[0])[1] if found else None


def _parts(folder: Path) -> list[tuple[Path, Architecture]]:
    """The folders of a database, and what they are for. Raises DatabaseError."""
    found = []
    for path in sorted(folder.glob(f"*/{ARCHITECTURE}")):
        try:
            found.append((path.parent, decode(Architecture, json.loads(path.read_text()), ARCHITECTURE)))
        except (OSError, ValueError) as error:
            raise DatabaseError(f"'{path}' is damaged: {error}.") from error
    return found


def open_database(folder: Path) -> ms.database.JSONDatabase:
    """What a database in a folder holds at this moment, to be read. Nothing in it is touched: somebody may be writing,
    and nobody may write into an installed package. Raises DatabaseError.
    """
    contents = {name: _contents(folder / name) for name in (RECORDS, WORKLOADS)}  # what is named is written first
    with tempfile.TemporaryDirectory() as temporary:
        for name, data in contents.items():
            (Path(temporary) / name).write_bytes(data)
        return opened(Path(temporary))


def best(folder: Path) -> list[ms.database.TuningRecord]:
    """What is settled for an architecture, whose folder this is, and which may be missing."""
    return list(open_database(folder / BEST).get_all_tuning_records())


def pack(folder: Path) -> None:
    """Compresses the best records for an architecture, whose folder this is: `held` reads it, nobody can add to it."""
    for name in (WORKLOADS, RECORDS):
        path = folder / BEST / name
        path.with_name(f"{name}{_PACKED}").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()


def _contents(path: Path) -> bytes:
    """The whole lines of a file, which may be packed."""
    packed = path.with_name(f"{path.name}{_PACKED}")
    if packed.exists():
        return lzma.decompress(packed.read_bytes())
    return whole_lines(path.read_bytes()) if path.exists() else b""


def journal(folder: Path) -> list[Trial]:
    """The trials of an architecture, whose folder this is, in order. Raises DatabaseError."""
    path = folder / _JOURNAL
    try:
        lines = whole_lines(path.read_bytes()).splitlines() if path.exists() else []
        return [decode(Trial, json.loads(line), _JOURNAL) for line in lines]
    except ValueError as error:
        raise DatabaseError(f"'{path}' is damaged: {error}.") from error


def write_journal(folder: Path, trials: Iterable[Trial]) -> None:
    """Puts these trials in place of those of an architecture, whose folder this is."""
    _replace(folder / _JOURNAL, "".join(json.dumps(asdict(trial)) + "\n" for trial in trials))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)
