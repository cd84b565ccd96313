"""A database refuses every line that is not a record by its number, and no line ends the process."""

from __future__ import annotations

import json
import lzma
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lowering.tuning_records import database, lookup
from tests.support.error_codes import raises

RECORDS, WORKLOADS = "database_tuning_record.json", "database_workload.json"
PRESETS = sorted(lookup.PRESETS.glob("*/best"))
VALUES: list[Any] = [None, 0, -1, 2**70, 1.5, "x", [], {}, True]


def lines(name: str) -> list[bytes]:
    return lzma.decompress((PRESETS[0] / f"{name}.xz").read_bytes()).splitlines()


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from list_paths(item, (*path, key))


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copy


def outcome(folder: Path, records: list[bytes], workloads: list[bytes]) -> str:
    """Open a database in a process of its own, and return the outcome."""
    for name, content in ((RECORDS, records), (WORKLOADS, workloads)):
        (folder / name).write_bytes(b"\n".join(content) + b"\n")
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            [record.trace for record in database.open_writable(folder).get_all_tuning_records()]
        except database.DatabaseError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return f"signal {os.WTERMSIG(status)}"
    return ("opened", "refused", "raw")[os.WEXITSTATUS(status)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_any_value_of_a_record_may_be_another(seed: int, tmp_path: Path) -> None:
    rng, records, workloads = np.random.default_rng(seed), lines(RECORDS), lines(WORKLOADS)
    record = json.loads(records[int(rng.integers(len(records)))])
    everywhere = list(list_paths(record))
    chosen = [everywhere[k] for k in rng.permutation(len(everywhere))[:6]]
    shallow = [path for path in everywhere if len(path) < 3]
    chosen.append(shallow[int(rng.integers(len(shallow)))])
    for path in chosen:
        for value in VALUES:
            result = outcome(tmp_path, [json.dumps(replace_at(record, path, value)).encode()], workloads)
            assert result in ("opened", "refused"), (path, value)
            assert result == "refused" or value is not None or path == (1, 1), path


def test_seconds_may_be_missing_but_not_null_in_a_list(tmp_path: Path) -> None:
    record, workloads = json.loads(lines(RECORDS)[0]), lines(WORKLOADS)
    for seconds, expected in ((None, "opened"), ([None], "refused"), ([1e-3, None], "refused"), ([1e-3], "opened")):
        changed = replace_at(record, (1, 1), seconds)
        assert outcome(tmp_path, [json.dumps(changed).encode()], workloads) == expected, seconds


@pytest.mark.parametrize(
    "line", [b"null", b"[]", b"0", b"{}", b"[null, null]", b'["x"]', b"[" * 10_000, b"\xff", b"nul"]
)
def test_lines_that_are_none(line: bytes, tmp_path: Path) -> None:
    records, workloads = lines(RECORDS), lines(WORKLOADS)
    assert outcome(tmp_path, [records[0], line], workloads) == "refused"
    with raises("database.file_damaged", kind=database.DatabaseError):
        database.open_writable(tmp_path)
    assert outcome(tmp_path, records, [line, *workloads]) == "refused"
