"""Databases are shown, merged, pruned, exported and plotted: by the functions, and by the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tvm.s_tir import meta_schedule as ms

import lowering
from lowering.commands.cli import main
from lowering.tuning import upkeep
from lowering.tuning.plot import compute_best_so_far
from lowering.tuning.search.ranks import compute_rank_correlation
from lowering.tuning_records import database
from lowering.tuning_records.candidate_choices import read_trace_choice
from lowering.tuning_records.database import list_records, open_database, open_writable, read_best_records, read_journal
from tests.tuning.models import matmul


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Tune in two sessions: 8 and 24 rows, then 8 rows with another seed."""
    databases = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    lowering.tune(matmul(), databases[0], budget=600, trials=16, sizes=[{"n": 8}, {"n": 24}])
    lowering.tune(matmul(), databases[1], budget=600, trials=8, sizes=[{"n": 8}], seed=5)
    return databases


def records(folder: Path, name: str) -> int:
    return sum(len(open_writable(arch / name)) for arch in upkeep.list_architecture_folders(folder))


def list_best_choices(folder: Path) -> list[tuple[str, str]]:
    """Return the task and the choice of every final record."""
    (architecture,) = upkeep.list_architecture_folders(folder)
    return [
        (database.hash_task(record.workload.mod), read_trace_choice(record.trace) or "")
        for record in read_best_records(architecture)
    ]


def test_show(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    summaries = upkeep.summarize_database(folders[0])
    assert len(summaries) == 6 and sum(s.trials for s in summaries) == records(folders[0], "trials")
    for s in summaries:
        assert s.fastest <= s.default and s.best is not None and s.best <= s.default
        assert {8, 24} & {shape[0] for shape in s.shapes if isinstance(shape, tuple)}
    assert main(["db", "show", str(folders[0])]) == 0
    shown = capsys.readouterr().out
    assert summaries[0].architecture in shown and "8x96" in shown and "1.00x" in shown
    assert main(["db", "show", str(folders[0]), "--json"]) == 0
    tasks = json.loads(capsys.readouterr().out)["tasks"]
    assert [(task["trials"], task["fastest"]) for task in tasks] == [(s.trials, s.fastest) for s in summaries]


def test_a_database_is_looked_at_while_it_grows(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task and its record arrive between the reads of two files, and a line is half written. Nothing changes."""
    folder = tmp_path / "database"
    shutil.copytree(folders[0], folder)
    (arch,) = upkeep.list_architecture_folders(folder)
    all_records = open_database(arch / "trials").get_all_tuning_records()
    for path in (arch / "trials").iterdir():
        path.write_bytes(b"")
    read = database._contents

    def contents(path: Path) -> bytes:
        data = read(path)
        if "trials" in str(path) and not len(trials := open_writable(arch / "trials")):
            record = all_records[0]
            workload = trials.commit_workload(record.workload.mod)
            trials.commit_tuning_record(
                ms.database.TuningRecord(record.trace, workload, [1.0], record.target, record.args_info)
            )
        return data

    monkeypatch.setattr(database, "_contents", contents)
    upkeep.summarize_database(folder)
    with (arch / "journal.jsonl").open("a") as file, (arch / "best" / "database_workload.json").open("a") as other:
        file.write('{"task": "ab')
        other.write('["-123')
    files = [path for path in arch.rglob("*") if path.is_file()]
    before = [path.read_bytes() for path in files]
    assert len(upkeep.summarize_database(folder)) == 1
    assert before == [path.read_bytes() for path in files]


def test_a_merge_has_all_records_in_the_seconds_of_the_target(folders: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "merged"
    upkeep.merge_databases(folders, target)
    assert len(upkeep.summarize_database(target)) == 6
    counts = [records(folder, "trials") for folder in (*folders, target)]
    assert max(counts[:2]) < counts[2] < counts[0] + counts[1]  # the defaults of 8 rows are in both
    (source,), (merged,) = (upkeep.list_architecture_folders(folder) for folder in (folders[0], target))
    before = {(s.task, s.default) for s in upkeep.summarize_database(folders[0])}
    assert before == {(s.task, s.default) for s in upkeep.summarize_database(target)}
    assert len(read_journal(merged)) > len(read_journal(source))
    best = {choice for folder in folders for choice in list_best_choices(folder)}  # a task may have a winner in each
    upkeep.merge_databases(folders, target)  # again: nothing is there twice
    assert records(target, "trials") == counts[2]
    assert sorted(list_best_choices(target)) == sorted(best)
    module = lowering.compile(matmul(), database=target)
    assert all(kernel.source for kernel in module.manifest.kernels)


def test_prune_keeps_the_fastest_and_final_records(folders: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "pruned"
    shutil.copytree(folders[0], folder)
    before = upkeep.summarize_database(folder)
    gone = upkeep.prune_database(folder, keep=2)
    after = upkeep.summarize_database(folder)
    assert gone == sum(s.trials for s in before) - sum(s.trials for s in after) > 0
    assert all(s.trials <= 4 for s in after)
    assert [(s.fastest, s.best) for s in before] == [(s.fastest, s.best) for s in after]


def test_an_export_is_all_that_compile_needs(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["db", "export", str(folders[0]), "-o", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(tmp_path / "out")}
    assert records(tmp_path / "out", "trials") == 0
    sources = [
        [k.source for k in lowering.compile(matmul(), database=folder).manifest.kernels]
        for folder in (folders[0], tmp_path / "out")
    ]
    assert sources[0] == sources[1] and all(sources[0])


def test_a_pack_is_what_won_and_what_it_beat(folders: list[Path], tmp_path: Path, capsys) -> None:
    """The pack is compressed. It excludes winners below the threshold, and those against a default of other days."""
    folder = tmp_path / "database"
    shutil.copytree(folders[0], folder)
    (arch,) = upkeep.list_architecture_folders(folder)
    best, trials = open_writable(arch / "best"), open_database(arch / "trials")
    tasks = [
        records for s in trials.get_all_tuning_records() if len(records := list_records(trials, s.workload.mod)) > 1
    ]
    first, second, *_ = {str(records[0].workload.mod): records for records in tasks}.values()
    for records, gain in ((first, 2), (second, 1.5)):
        *_, default = list_records(best, records[0].workload.mod)
        other = next(r for r in records if read_trace_choice(r.trace) != read_trace_choice(default.trace))
        won = [float(default.run_secs[0]) / gain]
        own = best.commit_workload(other.workload.mod)
        best.commit_tuning_record(ms.database.TuningRecord(other.trace, own, won, other.target, other.args_info))
    command = ["db", "pack", str(folder), "-o"]
    for least, packed in (("1.8", 1), ("1.4", 2)):
        assert main([*command, str(tmp_path / least), "--least", least]) == 0
        assert f"packed {packed} kernels" in capsys.readouterr().out
        (new,) = upkeep.list_architecture_folders(tmp_path / least)
        packed_records = {
            (str(r.workload.mod), read_trace_choice(r.trace), float(r.run_secs[0])) for r in read_best_records(new)
        }
        assert len(packed_records) == 2 * packed and packed_records < {
            (str(r.workload.mod), read_trace_choice(r.trace), float(r.run_secs[0])) for r in read_best_records(arch)
        }
    assert sum(file.stat().st_size for file in new.rglob("*.*")) < 20_000
    assert main([*command, str(new.parent)]) == 1
    assert "[argument.folder_not_empty]" in capsys.readouterr().err


def test_defaults_of_other_days_are_not_packed(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "is_current", lambda task, target: False)
    assert upkeep.pack_presets(folders[0], tmp_path / "none", 0.0) == 0 and not (tmp_path / "none").exists()


def test_a_picture(folders: list[Path], tmp_path: Path) -> None:
    assert main(["db", "plot", str(folders[0]), "-o", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (arch,) = upkeep.list_architecture_folders(folders[0])
    task = read_journal(arch)[0].task
    trials = [t for t in read_journal(arch) if t.task == task]
    course = compute_best_so_far(trials)
    assert course[0] == 1 and course == sorted(course, reverse=True) and len(course) == len(trials)


def test_rank_correlation() -> None:
    x = np.array([1.0, 2.0, 5.0, 9.0])
    assert compute_rank_correlation(x, np.exp(x)) == pytest.approx(1) and compute_rank_correlation(
        x, -x
    ) == pytest.approx(-1)


@pytest.mark.parametrize(
    "line, code",
    [
        ("show missing", "database.folder_missing"),
        ("merge missing -o out", "database.folder_missing"),
        ("merge missing", "argument.option_missing"),
        ("plot missing", "argument.option_missing"),
        ("show a b", "argument.database_count_mismatch"),
    ],
)
def test_what_does_not_go(
    line: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["db", *line.split()]) == 1
    assert f"error[{code}]: " in capsys.readouterr().err
