"""Several processes write to one database at once: nothing is lost, and every record belongs to its own task."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.s_tir import meta_schedule as ms

import lowering
from lowering.target import resolve
from lowering.tuning import upkeep
from lowering.tuning_records import database, lookup
from lowering.tuning_records.database import TuningDatabase, hash_task, open_database, read_journal
from tests.tuning.models import matmul

TARGET = resolve("cpu")[0]

Records = list[ms.database.TuningRecord]


@pytest.fixture(scope="module")
def records() -> Records:
    """Return one record of each of six tasks."""
    folder = min(lookup.PRESETS.iterdir())
    record = database.read_best_records(folder)[0]
    return [renumber_task(record, number) for number in range(6)]


def renumber_task(record: ms.database.TuningRecord, number: int) -> ms.database.TuningRecord:
    """Return the record as one of another task, which differs in an attribute."""
    functions = {name: func.with_attr("number", number) for name, func in record.workload.mod.functions_items()}
    workload = ms.database.Workload(tvm.IRModule(functions, attrs=record.workload.mod.attrs))
    return ms.database.TuningRecord(record.trace, workload, record.run_secs, record.target, record.args_info)


def find_arch(folder: Path) -> Path:
    (architecture,) = upkeep.list_architecture_folders(folder)
    return architecture


def list_trials(folder: Path, name: str = database.TRIALS) -> list[tuple[str, float]]:
    return sorted(
        (hash_task(r.workload.mod), float(r.run_secs[0])) for r in open_database(folder / name).get_all_tuning_records()
    )


def commit(to: TuningDatabase, record: ms.database.TuningRecord, seconds: float) -> None:
    to.commit(record.workload.mod, record.trace, seconds, record.target)


# Pairs of writer and task, in order.
@pytest.mark.parametrize(
    "turns",
    [
        [(0, 0), (1, 1)],
        [(0, 0), (0, 1), (1, 2), (1, 0), (0, 3)],
        [(k % 2, k) for k in range(6)],
        [(k % 3, k) for k in (0, 1, 2, 2, 1, 0, 5, 4)],
        [(0, 0), (1, 0), (2, 0), (0, 1)],
    ],
)
def test_commits_in_turn(turns: list[tuple[int, int]], records: Records, tmp_path: Path) -> None:
    writers = [TuningDatabase(tmp_path, TARGET) for _ in range(3)]
    for seconds, (writer, task) in enumerate(turns, 1):
        commit(writers[writer], records[task], float(seconds))
        writers[writer].record_best(
            records[task].workload.mod, records[task].trace, float(seconds), records[task].target
        )
    expected = sorted((hash_task(records[t].workload.mod), float(s)) for s, (_, t) in enumerate(turns, 1))
    assert list_trials(find_arch(tmp_path)) == list_trials(find_arch(tmp_path), database.BEST) == expected
    assert sorted((trial.task, trial.seconds) for trial in read_journal(find_arch(tmp_path))) == expected
    for writer, its in enumerate(writers):  # each knows its own
        own_tasks = {hash_task(records[t].workload.mod) for w, t in turns if w == writer}
        assert {hash_task(r.workload.mod) for r in its.trials.get_all_tuning_records()} == own_tasks


def tear(folder: Path) -> None:
    """Leave lines like a writer that is killed."""
    for path in (*folder.glob("*/database_*.json"), folder / "journal.jsonl"):
        with path.open("a") as file:
            file.write('["123')


def shorten(folder: Path) -> None:
    upkeep.prune_database(folder.parent, keep=0)


def clear(folder: Path) -> None:
    for path in folder.glob("*/database_*.json"):
        path.unlink()


@pytest.mark.parametrize(("meanwhile", "left"), [(tear, 2), (shorten, 1), (clear, 1)])
def test_what_others_do_meanwhile(
    meanwhile: Callable[[Path], None], left: int, records: Records, tmp_path: Path
) -> None:
    writer = TuningDatabase(tmp_path, TARGET)
    commit(writer, records[0], 1.0)
    meanwhile(find_arch(tmp_path))
    commit(writer, records[1], 2.0)
    expected = [(hash_task(record.workload.mod), seconds) for record, seconds in zip(records, (1.0, 2.0))]
    assert list_trials(find_arch(tmp_path)) == sorted(expected[2 - left :])
    assert [trial.seconds for trial in read_journal(find_arch(tmp_path))] == [1.0, 2.0]


@pytest.mark.parametrize("step", range(18))
def test_a_prune_that_is_cut_short(
    step: int, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any file that prune moves or removes, all records remain, or those that it retains."""
    writer, steps = TuningDatabase(tmp_path, TARGET), [0]
    for seconds in (3.0, 1.0, 2.0):
        for record in records[:2]:
            commit(writer, record, seconds)
    before, after = ([(t, s) for t, s in list_trials(find_arch(tmp_path)) if s <= limit] for limit in (3.0, 1.0))

    def cut_short(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if steps[0] == step:
                raise KeyboardInterrupt
            steps[0] += 1
            return function(*arguments, **options)

        return run

    for name in ("rename", "replace", "rmdir", "unlink"):
        for module in (os, Path):
            monkeypatch.setattr(module, name, cut_short(getattr(module, name)))
    with suppress(KeyboardInterrupt):
        upkeep.prune_database(tmp_path, keep=1)
    monkeypatch.undo()
    assert list_trials(find_arch(tmp_path)) in (before, after)
    commit(TuningDatabase(tmp_path, TARGET), records[2], 4.0)
    assert (hash_task(records[2].workload.mod), 4.0) in list_trials(find_arch(tmp_path))


def test_processes_at_once(records: Records, tmp_path: Path) -> None:
    """Four processes write 24 records each; lines of workloads are longer than a single write."""
    children = []
    for child in range(4):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                writer = TuningDatabase(tmp_path, TARGET)
                for k in range(24):
                    commit(writer, records[(child + k) % 6], 100.0 * child + k)
                code = 0
            finally:
                os._exit(code)
        children.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    expected = [(hash_task(records[(c + k) % 6].workload.mod), 100.0 * c + k) for c in range(4) for k in range(24)]
    assert list_trials(find_arch(tmp_path)) == sorted(expected)
    assert len(read_journal(find_arch(tmp_path))) == 96


@pytest.mark.slow
def test_two_tunings_at_once(tmp_path: Path) -> None:
    """Each model has tasks that the other does not have, and one that both have."""
    children = []
    for rows in (8, 24):
        process = os.fork()
        if process == 0:
            code = 1
            try:
                done = lowering.tune(matmul(), tmp_path, trials=16, sizes=[{"n": rows}, {"n": 64}])
                code = int(done.interrupted or sum(o.trials for o in done.outcomes) < 16)
            finally:
                os._exit(code)
        children.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    trials = list_trials(find_arch(tmp_path))
    assert len(trials) >= 32 + 9  # with the defaults
    assert sorted((t.task, t.seconds) for t in read_journal(find_arch(tmp_path)) if t.seconds is not None) == trials
    for rows in (8, 24, 64):
        module = lowering.compile(matmul(rows=rows), database=tmp_path)
        assert all(kernel.source for kernel in module.manifest.kernels)
