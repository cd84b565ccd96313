"""Validation of lines in MetaSchedule's databases: TVM ends the process if a value is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import LoweringError


class DatabaseError(LoweringError):
    """A database is damaged, or the folder is not a database."""


def check_records(path: Path) -> None:
    """Raise DatabaseError for a line of a file, if it exists, that is not a record of a measurement."""
    _check_lines(path, "record", _find_record_errors)


def check_workloads(path: Path) -> None:
    """Raise DatabaseError for a line of a file, if it exists, that is not a workload."""
    _check_lines(path, "workload", _find_workload_errors)


def _check_lines(path: Path, kind: str, find_errors: Callable[[Any], Iterator[str]]) -> None:
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            problem = next(find_errors(json.loads(line)), None)
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem is not None:
            raise DatabaseError(
                "database.file_damaged", f"'{path}' is damaged: line {number} is not a {kind}: {problem}."
            )


def _find_workload_errors(workload: Any) -> Iterator[str]:
    """Yield the errors of a workload, which is [hash, module], both text."""
    if not isinstance(workload, list) or [type(item) for item in workload] != [str, str]:
        yield "it is not a hash and a module"


def _find_record_errors(record: Any) -> Iterator[str]:
    """Yield the errors of a record.

    A record is [workload, [[instructions, decisions], seconds, target, arguments]]. seconds are null before the
    measurement.
    """
    if not isinstance(record, list) or len(record) != 2 or not _is_index(record[0]):
        yield "it is not the number of a workload and what was measured"
        return
    measured = record[1]
    if not isinstance(measured, list) or len(measured) != 4 or not isinstance(measured[0], list):
        yield "it has no trace, seconds, target and arguments"
        return
    trace, seconds, *rest = measured
    if _has_null([trace, rest]) or (seconds is not None and _has_null(seconds)):
        yield "it has null in it"
    if len(trace) != 2 or not all(isinstance(item, list) for item in trace):
        yield "its trace has no instructions and decisions"
        return
    instructions, decisions = trace
    for decision in decisions:
        if not isinstance(decision, list) or len(decision) != 2 or not _is_index(decision[0], len(instructions)):
            yield "it decides on an instruction that is not there"


def _is_index(value: Any, count: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def _has_null(value: Any) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return value is None or any(map(_has_null, children))
