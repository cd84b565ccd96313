"""MetaSchedule's JSON databases that several processes add to at once.

A record names its workload by the number of a line, and TVM reads the lines only when it opens the files. So each
process has what it knows in memory, and whoever writes holds a lock and opens the files again where they have changed.
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
    """The records of a folder. `known` has what was there when it was opened, and what this process has added since."""

    def __init__(self, folder: Path) -> None:
        """The caller holds the lock of the folder above (`locked`). Raises DatabaseError."""
        self._folder = folder
        self._files, self._stamp = opened(folder), _stamp(folder)
        self.known = ms.database.MemoryDatabase()
        workloads: dict[ms.database.Workload, ms.database.Workload] = {}
        for record in self._files.get_all_tuning_records():
            if record.workload not in workloads:
                workloads[record.workload] = self.known.commit_workload(record.workload.mod)
            self.known.commit_tuning_record(
                ms.database.TuningRecord(
                    record.trace, workloads[record.workload], record.run_secs, record.target, record.args_info
                )
            )

    def commit(self, task: tvm.IRModule, trace: Trace, seconds: float, target: tvm.target.Target) -> None:
        """Append a record. The caller holds the lock. Raises DatabaseError where the files were damaged since."""
        if _stamp(self._folder) != self._stamp:  # another process has written, or was killed while it did
            self._files = opened(self._folder)
        info = ms.arg_info.ArgInfo.from_prim_func(task[MAIN])
        for database in (self._files, self.known):
            workload = database.commit_workload(task)
            database.commit_tuning_record(ms.database.TuningRecord(trace, workload, [seconds], target, info))
        self._stamp = _stamp(self._folder)


def opened(folder: Path) -> ms.database.JSONDatabase:
    """MetaSchedule's database in a folder, to be written. A last line that a killed writer left unfinished is cut off.

    The caller holds the lock where other processes may write. Raises DatabaseError.
    """
    for name in (WORKLOADS, RECORDS):
        repair_lines(folder / name)
    check_records(folder / RECORDS)
    check_workloads(folder / WORKLOADS)
    try:
        return ms.database.JSONDatabase(str(folder / WORKLOADS), str(folder / RECORDS), allow_missing=True)
    except Exception as error:  # TVM raises what it likes
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise DatabaseError(f"'{folder}' holds no database of this version of TVM: {lines[-1]}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Have no other process write below a folder; one after the other, however long each takes. Not to be nested."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: one process at a time, as its user sees to
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _stamp(folder: Path) -> _Stamp:
    """What changes when one of the files does."""
    stamps: list[tuple[int, int, int] | None] = []
    for name in (WORKLOADS, RECORDS):
        try:
            found = (folder / name).stat()
        except FileNotFoundError:
            stamps.append(None)
        else:
            stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return tuple(stamps)
