"""Every line of a database that is not a record is refused by its number, and none ends the process."""

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

from lowering.tuning import database

RECORDS, WORKLOADS = "database_tuning_record.json", "database_workload.json"
PRESETS = sorted((Path(database.__file__).parents[1] / "presets").glob("*/best"))
VALUES: list[Any] = [None, 0, -1, 2**70, 1.5, "x", [], {}, True]


def lines(name: str) -> list[bytes]:
    return lzma.decompress((PRESETS[0] / f"{name}.xz").read_bytes()).splitlines()


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = changed(value[place[0]], place[1:], new)
    return copy


def outcome(folder: Path, records: list[bytes], workloads: list[bytes]) -> str:
    """What opening a database comes to, in a process of its own."""
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


@pytest.mark.parametrize("seed", range(4))
def test_any_value_of_a_record_may_be_another(seed: int, tmp_path: Path) -> None:
    rng, records, workloads = np.random.default_rng(seed), lines(RECORDS), lines(WORKLOADS)
    record = json.loads(records[int(rng.integers(len(records)))])
    everywhere = list(places(record))
    chosen = [everywhere[k] for k in rng.permutation(len(everywhere))[:6]]
    shallow = [place for place in everywhere if len(place) < 3]
    chosen.append(shallow[int(rng.integers(len(shallow)))])
    for place in chosen:
        for value in VALUES:
            found = outcome(tmp_path, [json.dumps(changed(record, place, value)).encode()], workloads)
            assert found in ("opened", "refused"), (place, value)
            assert found == "refused" or value is not None or place == (1, 1), place


@pytest.mark.parametrize(
    "line", [b"null", b"[]", b"0", b"{}", b"[null, null]", b'["x"]', b"[" * 10_000, b"\xff", b"nul"]
)
def test_lines_that_are_none(line: bytes, tmp_path: Path) -> None:
    records, workloads = lines(RECORDS), lines(WORKLOADS)
    assert outcome(tmp_path, [records[0], line], workloads) == "refused"
    with pytest.raises(
        database.DatabaseError, match=r"database_tuning_record\.json' is damaged: line 2 is not a record"
    ):
        database.open_writable(tmp_path)
    assert outcome(tmp_path, records, [line, *workloads]) == "refused"
