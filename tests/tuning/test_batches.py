"""Candidates are built here and measured without a compiler: here in a process that cannot import one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lowering
from lowering.commands.cli import main
from lowering.errors import ArtifactError, InputError
from lowering.measuring.batch import BATCH, RESULTS, measure_batch, read_batch, read_results
from lowering.tuning_records.database import read_journal
from tests.support.error_codes import raises
from tests.tuning import models
from tests.tuning.models import matmul

ROOT = Path(__file__).parents[2]

# The program of the other machine.
MEASURE = """
import sys
for name in ("tvm", "onnx", "onnx_ir", "schedules", "xgboost"):
    sys.modules[name] = None
from lowering.commands.cli import main
sys.exit(main(["measure", *sys.argv[1:]]))
"""


def measured(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MEASURE, str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export four candidates of each kernel of `matmul`."""
    folder = tmp_path_factory.mktemp("batch")
    tuning = lowering.tune(matmul(rows=64), folder / "database", trials=4, export=folder / "candidates")
    assert [o.trials for o in tuning.outcomes] == [4, 4, 4]  # the softmax has two: tiles and loops
    return folder / "candidates"


def copied(batch: Path, folder: Path) -> Path:
    shutil.copytree(batch, folder / "batch")
    return folder / "batch"


def test_round_trip(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results become records that compile uses, once; the next candidates are others."""
    batch, database = copied(exported, tmp_path), tmp_path / "database"
    with raises("measure.results_missing"):
        lowering.file_results(batch, database, "cpu")
    done = measured(batch)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("default's speed") >= 12 and "0 of candidates that failed" in done.stdout
    again = json.loads(measured(batch, "--json").stdout)["results"]
    assert len(again) >= 12 and all(result["cause"] is None for result in again)
    command = ["tune", "model.onnx", "--database", str(database), "--import-results", str(batch), "--json"]
    assert main(command) == 0
    filed = json.loads(capsys.readouterr().out)["filed"]
    assert (filed["tasks"], filed["trials"]) == (3, 12)
    assert lowering.file_results(batch, database, "cpu").trials == 0
    module = lowering.compile(matmul(rows=64), database=database)
    assert all(kernel.source.startswith("tuned") for kernel in module.manifest.kernels)
    lowering.tune(matmul(rows=64), database, trials=4, export=tmp_path / "next")
    (folder,) = database.iterdir()
    before = {trial.candidate for trial in read_journal(folder)}
    assert len(before) == 15  # three defaults
    for task in read_batch(tmp_path / "next").tasks:
        choices = (tmp_path / "next" / task.name / "choices.jsonl").read_text().splitlines()
        assert task.candidates == len(choices) == 4 and not before & set(choices)


def test_bad_candidates_are_results(exported: Path, tmp_path: Path) -> None:
    """A crash, a stopped endless loop, and a wrong answer are filed by cause and never chosen."""
    batch, database = copied(exported, tmp_path), tmp_path / "database"
    task = read_batch(batch).tasks[0]
    for number, bad in enumerate((models.crashes, models.wrong)):
        models.library(bad, batch / task.name, str(number))
    results = measure_batch(batch)
    causes = {r.candidate: r.cause for r in results if r.task == task.name and not r.last}
    assert causes[0] in ("crash", "error") and causes[1] in ("crash", "error", "wrong") and causes[2] is None
    lowering.file_results(batch, database, "cpu")
    (folder,) = database.iterdir()
    assert sum(trial.cause is not None for trial in read_journal(folder)) == 2


def test_killed_in_the_middle(exported: Path, tmp_path: Path) -> None:
    """Measured results stay; the next run measures the rest."""
    batch = copied(exported, tmp_path)
    process = subprocess.Popen([sys.executable, "-c", MEASURE, str(batch)], cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (batch / RESULTS).exists() or (batch / RESULTS).read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    first = read_results(batch)
    assert first is not None and len(first[1]) >= 2
    with (batch / RESULTS).open("a") as file:
        file.write('{"task": "half a li')
    assert measured(batch).returncode == 0
    second = read_results(batch)
    assert second is not None and second[1][: len(first[1])] == first[1]
    assert len({(r.task, r.candidate) for r in second[1]}) == 12


def test_refusals(exported: Path, tmp_path: Path) -> None:
    batch = copied(exported, tmp_path)
    with raises("argument.folder_not_empty"):
        lowering.tune(matmul(rows=64), tmp_path / "d", export=batch)
    with raises("measure.candidates_missing"):
        measure_batch(tmp_path)
    data = json.loads((batch / BATCH).read_text())
    for change, error, text in (
        ({"format": 99}, InputError, "has format 99"),
        ({"cpu_features": ["warp_drive"]}, ArtifactError, "a CPU with warp_drive"),
        ({"threads": "all"}, InputError, "cannot be read"),
    ):
        (batch / BATCH).write_text(json.dumps(data | change))
        with pytest.raises(error, match=text):
            measure_batch(batch)
    (batch / BATCH).write_text(json.dumps(data))
    machine = batch / "machine.json"
    machine.write_text(json.dumps({"caches": [1, 2], "gpu": ""}))
    with raises("measure.machine_mismatch"):
        measure_batch(batch)
