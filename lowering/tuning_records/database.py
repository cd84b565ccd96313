"""Tuning databases: a folder for each architecture, with two of MetaSchedule's own JSON databases in it.

    DIR/<architecture>/architecture.json    the full architecture
                      /trials/              all measurements, each line written when it was measured
                      /best/                winners of final comparisons, and the defaults
                      /journal.jsonl        every trial in order: time, prediction and outcome

A record applies to a function that is identical to its own, on the same architecture, with kernels of the same
versions. Its seconds are the default's time at the first measurement of the task, multiplied by the ratio measured
later. So records of all sessions are comparable, and the fastest is the best. Both databases only grow, so that a
killed writer loses at most one line.
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
from ..measuring.isolated import CandidateFailure
from ..measuring.lines import append_line, repair_lines, whole_lines
from ..measuring.machine import TuningMachine, read_tuning_machine
from ..records import decode
from ..target import Target
from .architecture import Architecture, detect_architecture
from .candidate_choices import read_trace_choice
from .record_lines import DatabaseError as DatabaseError
from .shared_records import RECORDS, WORKLOADS, SharedRecords, lock_folder
from .shared_records import open_writable as open_writable

TRIALS, BEST = "trials", "best"
_PACKED_SUFFIX = ".xz"
ARCHITECTURE, _JOURNAL = "architecture.json", "journal.jsonl"


@dataclass(frozen=True)
class TrialRecord:
    """The outcome of a candidate: its task by hash, its choice, and its seconds or the cause of its failure.

    predicted is the logarithm of the cost model's predicted time, up to a constant of the task. at is Unix time.
    """

    task: str
    candidate: str
    seconds: float | None
    predicted: float
    at: float
    cause: str | None = None
    text: str = ""


class TuningDatabase:
    """The records of a database for one architecture. Its folder is created if it is missing."""

    def __init__(self, folder: Path, target: Target, measured_on: TuningMachine | None = None) -> None:
        """Open the records for a target. measured_on is the measuring machine, if it is not this one."""
        self.architecture = detect_architecture(target, measured_on)
        self.folder = folder / self.architecture.name
        try:
            for name in (TRIALS, BEST):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            path = self.folder / ARCHITECTURE
            if not path.exists():
                _replace(path, self.architecture.to_json())
        except OSError as error:
            raise DatabaseError(
                "database.unwritable", f"'{self.folder}' cannot be written: {error.strerror or error}."
            ) from error
        with lock_folder(self.folder):
            repair_lines(self.folder / _JOURNAL)
            self._trials, self._best = (SharedRecords(self.folder / name) for name in (TRIALS, BEST))
        self._failures = [trial for trial in read_journal(self.folder) if trial.cause is not None]

    @property
    def trials(self) -> ms.database.MemoryDatabase:
        """The measurements from before this process started, and those of this process."""
        return self._trials.records

    def commit(
        self,
        task: tvm.IRModule,
        trace: Trace,
        seconds: float,
        target: tvm.target.Target,
        predicted: float = 0.0,
    ) -> None:
        """Append a measurement."""
        self._append_trial(
            TrialRecord(hash_task(task), read_trace_choice(trace) or "", seconds, predicted, time.time())
        )
        with lock_folder(self.folder):
            self._trials.commit(task, trace, seconds, target)

    def record_failure(
        self, task: tvm.IRModule, candidate: str, failed: CandidateFailure, predicted: float = 0.0
    ) -> TrialRecord:
        """Append a failed trial."""
        trial = TrialRecord(hash_task(task), candidate, None, predicted, time.time(), failed.cause, failed.text)
        self._failures.append(trial)
        self._append_trial(trial)
        return trial

    def _append_trial(self, trial: TrialRecord) -> None:
        with lock_folder(self.folder):
            repair_lines(self.folder / _JOURNAL)  # another process may have been killed since
            append_line(self.folder / _JOURNAL, asdict(trial))

    def measured_seconds(self, task: tvm.IRModule) -> dict[str, float]:
        """Return the seconds of the measured choices of a task."""
        seconds_by_choice: dict[str, float] = {}
        for record in list_records(self.trials, task):
            text = read_trace_choice(record.trace)
            if text is not None:
                seconds_by_choice.setdefault(text, read_seconds(record))
        return seconds_by_choice

    def traces(self, task: tvm.IRModule) -> dict[str, Trace]:
        """Return the traces of the measured choices of a task."""
        records = list_records(self.trials, task)
        return {text: r.trace for r in records if (text := read_trace_choice(r.trace)) is not None}

    def failures(self, task: tvm.IRModule) -> dict[str, TrialRecord]:
        """Return the failed trials of a task by candidate."""
        name = hash_task(task)
        return {failure.candidate: failure for failure in self._failures if failure.task == name}

    def record_best(self, task: tvm.IRModule, trace: Trace, seconds: float, target: tvm.target.Target) -> None:
        """Append the default, or the winner of a final comparison with it. The fastest record counts."""
        with lock_folder(self.folder):
            self._best.commit(task, trace, seconds, target)

    def best_record(self, task: tvm.IRModule) -> ms.database.TuningRecord | None:
        """Return the fastest of these records."""
        return next(iter(list_records(self._best.records, task)), None)


def hash_task(task: tvm.IRModule) -> str:
    """Return the hash of a task's module."""
    return f"{structural_hash(task) & (2**64 - 1):016x}"


def list_records(database: ms.database.Database, task: tvm.IRModule) -> list[ms.database.TuningRecord]:
    """Return the measured records of a task, the fastest first.

    MetaSchedule's own query omits records of traces without samples.
    """
    if not database.has_workload(task):
        return []
    workload = database.commit_workload(task)
    records = [r for r in database.get_all_tuning_records() if r.run_secs and r.workload.same_as(workload)]
    return sorted(records, key=read_seconds)


def read_seconds(record: ms.database.TuningRecord) -> float:
    return float(record.run_secs[0])


def find_matching_folders(folder: Path, target: Target) -> list[Path]:
    """Return the folders of a database whose records apply to a target.

    For code compiled for this CPU it is its own folder. For targets without a specific machine, GPUs included, they are
    those of all machines that measured such code, this machine's first.
    """
    wanted_architecture = detect_architecture(target)
    if wanted_architecture.caches:
        return [folder / wanted_architecture.name]
    try:
        local_architecture = detect_architecture(target, read_tuning_machine(gpu=bool(target.architecture)))
    except ArtifactError:  # this machine has no GPU
        local_architecture = wanted_architecture
    folders = [
        path
        for path, folder_architecture in _list_folders(folder)
        if folder_architecture.runs_same_code_as(wanted_architecture)
    ]
    return sorted(folders, key=lambda path: path.name != local_architecture.name)


def find_similar_folders(folder: Path, reference: Architecture) -> list[Path]:
    """Return the folders of CPUs that are similar to one (Architecture.is_similar_to)."""
    return [path for path, folder_architecture in _list_folders(folder) if reference.is_similar_to(folder_architecture)]


def find_last_machine(folder: Path, target: Target) -> TuningMachine | None:
    """Return the machine with the latest measurements of such code, or None without measurements."""
    wanted_architecture = detect_architecture(target)
    machines = [
        ((path / _JOURNAL).stat().st_mtime, TuningMachine(folder_architecture.caches, folder_architecture.card))
        for path, folder_architecture in _list_folders(folder)
        if folder_architecture.runs_same_code_as(wanted_architecture) and (path / _JOURNAL).exists()
    ]
    return max(machines, key=lambda item: item[0])[1] if machines else None


def _list_folders(folder: Path) -> list[tuple[Path, Architecture]]:
    """Return the folders of a database with their architectures. Raises DatabaseError."""
    folders = []
    for path in sorted(folder.glob(f"*/{ARCHITECTURE}")):
        try:
            folders.append((path.parent, decode(Architecture, json.loads(path.read_text()), ARCHITECTURE)))
        except (OSError, ValueError) as error:
            raise DatabaseError("database.file_damaged", f"'{path}' is damaged: {error}.") from error
    return folders


def open_database(folder: Path) -> ms.database.JSONDatabase:
    """Open a snapshot of the database in a folder, read-only.

    The files are not touched: another process may be writing, and installed packages must not be written to. Raises
    DatabaseError.
    """
    contents = {
        name: _contents(folder / name) for name in (RECORDS, WORKLOADS)
    }  # records refer to workloads, which are written first
    with tempfile.TemporaryDirectory() as temporary:
        for name, data in contents.items():
            (Path(temporary) / name).write_bytes(data)
        return open_writable(Path(temporary))


def read_best_records(folder: Path) -> list[ms.database.TuningRecord]:
    """Return the final records of an architecture's folder, which may be missing."""
    return list(open_database(folder / BEST).get_all_tuning_records())


def compress_records(folder: Path) -> None:
    """Compress the best records in an architecture's folder. They can be read, but not extended."""
    for name in (WORKLOADS, RECORDS):
        path = folder / BEST / name
        path.with_name(f"{name}{_PACKED_SUFFIX}").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()


def _contents(path: Path) -> bytes:
    """Return the complete lines of a file, which may be compressed."""
    packed = path.with_name(f"{path.name}{_PACKED_SUFFIX}")
    if packed.exists():
        return lzma.decompress(packed.read_bytes())
    return whole_lines(path.read_bytes()) if path.exists() else b""


def read_journal(folder: Path) -> list[TrialRecord]:
    """Return the trials in an architecture's folder, in order. Raises DatabaseError."""
    path = folder / _JOURNAL
    try:
        lines = whole_lines(path.read_bytes()).splitlines() if path.exists() else []
        return [decode(TrialRecord, json.loads(line), _JOURNAL) for line in lines]
    except ValueError as error:
        raise DatabaseError("database.file_damaged", f"'{path}' is damaged: {error}.") from error


def write_journal(folder: Path, trials: Iterable[TrialRecord]) -> None:
    """Replace the trials in an architecture's folder."""
    _replace(folder / _JOURNAL, "".join(json.dumps(asdict(trial)) + "\n" for trial in trials))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
