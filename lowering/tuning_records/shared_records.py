"""MetaSchedule's JSON databases with several concurrent writers.

A record refers to its workload by line number, and TVM reads the lines only when it opens the files. So each process
has its records in memory. A writer takes a lock, and opens the files again if they have changed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import tvm
from tvm.s_tir import Trace
from tvm.s_tir import meta_schedule as ms

from ..measuring.lines import repair_lines
from .record_lines import DatabaseError, check_records, check_workloads
from .task import MAIN

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
_Stamp = tuple[tuple[int, int, int] | None, ...]


class SharedRecords:
    """The records of a folder. `records` has those at opening, and those added by this process since."""

    def __init__(self, folder: Path) -> None:
        """Open the records. The caller must have locked the parent folder (`lock_folder`). Raises DatabaseError."""
        self._folder = folder
        self._files, self._stamp = open_writable(folder), _read_stamp(folder)
        self.records = ms.database.MemoryDatabase()
        workloads: dict[ms.database.Workload, ms.database.Workload] = {}
        for record in self._files.get_all_tuning_records():
            if record.workload not in workloads:
                workloads[record.workload] = self.records.commit_workload(record.workload.mod)
            self.records.commit_tuning_record(
                ms.database.TuningRecord(
                    record.trace, workloads[record.workload], record.run_secs, record.target, record.args_info
                )
            )

    def commit(self, task: tvm.IRModule, trace: Trace, seconds: float, target: tvm.target.Target) -> None:
        """Append a record. The caller must have the lock. Raises DatabaseError if the files were damaged meanwhile."""
        if _read_stamp(self._folder) != self._stamp:  # another process has written, or was killed while writing
            self._files = open_writable(self._folder)
        info = ms.arg_info.ArgInfo.from_prim_func(task[MAIN])
        for database in (self._files, self.records):
            workload = database.commit_workload(task)
            database.commit_tuning_record(ms.database.TuningRecord(trace, workload, [seconds], target, info))
        self._stamp = _read_stamp(self._folder)


def open_writable(folder: Path) -> ms.database.JSONDatabase:
    """Open MetaSchedule's database in a folder for writing. An incomplete last line is removed.

    The caller must have the lock if other processes may write. Raises DatabaseError.
    """
    for name in (WORKLOADS, RECORDS):
        repair_lines(folder / name)
    check_records(folder / RECORDS)
    check_workloads(folder / WORKLOADS)
    try:
        return ms.database.JSONDatabase(str(folder / WORKLOADS), str(folder / RECORDS), allow_missing=True)
    except Exception as error:  # TVM may raise any exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DatabaseError(
            "database.format_unsupported", f"'{folder}' does not contain a database of this version of TVM: {lines[-1]}"
        ) from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers, without a timeout. The lock is not reentrant."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # without file locks the user must not run several processes
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_stamp(folder: Path) -> _Stamp:
    """Return a value that changes when one of the files does."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in (WORKLOADS, RECORDS):
        try:
            status = (folder / name).stat()
        except FileNotFoundError:
            stamps.append(None)
        else:
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(stamps)
