"""Tuning a model: measured results are stored, failures are reported, and the winners are used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from tvm import tirx

import lowering
from lowering.compiling.compiler import compile_to
from lowering.errors import InputError
from lowering.measuring import trial as trial_of_one
from lowering.target import resolve
from lowering.tuning import local
from lowering.tuning.build import compile_library, get_unscheduled_function
from lowering.tuning.search.session import TuningState
from lowering.tuning_records.candidate_choices import read_trace_choice
from lowering.tuning_records.database import TuningDatabase, open_writable, read_best_records, read_journal
from lowering.tuning_records.lookup import choose_by_size
from schedules.variant import BySize, Choice, RuntimeSize
from tests.support.error_codes import raises
from tests.support.this_machine import WIDEST
from tests.tuning.models import expected, matmul

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, lowering.Tuning]:
    """Tune `matmul` with 2 and with 64 rows, and return the database."""
    folder = tmp_path_factory.mktemp("database")
    states: list[float] = []
    tuning = lowering.tune(
        matmul(), folder, trials=12, sizes=[{"n": 2}, {"n": 64}], progress=lambda state: states.append(state.left)
    )
    assert len(states) > 12 and states[0] > states[-1] > 0
    return folder, tuning


def trials(folder: Path) -> int:
    (architecture,) = (f for f in folder.iterdir() if f.is_dir())
    return len(open_writable(architecture / "trials").get_all_tuning_records())


def test_every_trial_is_in_the_database(tuned: tuple[Path, lowering.Tuning]) -> None:
    folder, tuning = tuned
    assert tuning.seconds < 600 and not tuning.interrupted and len(tuning.outcomes) == 6
    assert sum(o.trials for o in tuning.outcomes) + len(tuning.outcomes) == trials(folder)
    assert sum(o.trials for o in tuning.outcomes) == 12
    assert not any(o.failures or o.why for o in tuning.outcomes)
    assert sum({o.name: o.share for o in tuning.outcomes}.values()) == pytest.approx(1, abs=0.1)
    assert {o.nodes[0] for o in tuning.outcomes} == {"MatMul matmul", "Softmax softmax"}
    assert all(o.gain == 1 or o.gain > 1.03 for o in tuning.outcomes) and tuning.gain >= 1
    data = json.loads(next(folder.glob("*/architecture.json")).read_text())
    assert data["kind"] == tuning.database.name.split("-")[0]


def test_compile_uses_it_and_says_so(tuned: tuple[Path, lowering.Tuning]) -> None:
    model = matmul()
    module = lowering.compile(model, database=tuned[0])
    assert all(kernel.source.startswith("tuned ") for kernel in module.manifest.kernels)
    assert not any(kernel.source for kernel in lowering.compile(model).manifest.kernels)
    for rows in (1, 2, 3, 11, 12, 64, 200):
        x = np.random.default_rng(rows).standard_normal((rows, 96)).astype(np.float32)
        np.testing.assert_allclose(module.run({"x": x})["y"], expected(model, x), rtol=1e-4, atol=1e-7)


def test_a_model_with_other_weights_and_fixed_sizes_finds_its_records(tuned: tuple[Path, lowering.Tuning]) -> None:
    module = lowering.compile(matmul(rows=64, seed=1), database=tuned[0])
    assert [k.source.split()[0] for k in module.manifest.kernels] == ["tuned", "tuned"]
    module = lowering.compile(matmul(rows=63), database=tuned[0])
    assert not any(k.source[-1:] == "x" for k in module.manifest.kernels)  # at most tiles of nearby sizes


def test_it_goes_on_where_it_was(tuned: tuple[Path, lowering.Tuning], tmp_path: Path) -> None:
    folder = tmp_path / "database"
    shutil.copytree(tuned[0], folder)
    before = trials(folder)
    tuning = lowering.tune(matmul(rows=64), folder, trials=6)
    assert trials(folder) == before + sum(o.trials for o in tuning.outcomes)
    reference = {o.nodes: o.default for o in tuned[1].outcomes if "64x" in o.name}
    assert {o.nodes: o.default for o in tuning.outcomes} == reference


def test_records_of_other_architectures_and_versions_are_ignored(
    tuned: tuple[Path, lowering.Tuning], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "database"
    shutil.copytree(tuned[0], folder)
    other = "x86-64-v4" if WIDEST == "x86-64-v3" else "x86-64-v3"
    foreign = compile_to(tmp_path / "foreign", matmul(), f"cpu:{other}", database=folder)
    assert not any(k.source for k in foreign.kernels)
    from schedules.cpu.matmul.panels import PanelTiles

    monkeypatch.setattr(PanelTiles, "version", PanelTiles.version + 1)
    sources = {k.kind: k.source for k in lowering.compile(matmul(), database=folder).manifest.kernels}
    assert sources["matmul"] == "" and sources["other"] != ""


def test_a_choice_that_became_illegal_is_ignored(tuned: tuple[Path, lowering.Tuning], monkeypatch) -> None:
    from schedules.cpu.matmul.panels import PanelTiles

    monkeypatch.setattr(
        PanelTiles, "rules", lambda self, problem, machine: {"never": self.default(problem, machine) == self}
    )
    module = lowering.compile(matmul(), database=tuned[0])
    x = np.ones((2, 96), np.float32)
    np.testing.assert_allclose(module.run({"x": x})["y"], expected(matmul(), x), rtol=1e-4, atol=1e-7)


def poison(func: tirx.PrimFunc, kind: str) -> tirx.PrimFunc:
    """Return a function of the same arguments that leaves its result as it was, or never ends."""
    result = func.params[-1]
    first = [0] * len(result.shape)
    again = tirx.BufferStore(result, tirx.BufferLoad(result, first) + tirx.const(1, result.dtype), first)
    endless = tirx.While(tirx.BufferLoad(result, first) == tirx.BufferLoad(result, first), again)
    return func.with_body({"wrong": tirx.Evaluate(0), "hang": endless}[kind])


def test_poisoned_candidates_are_told_by_cause_and_never_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four candidates cannot be built, one answers wrongly and one never ends."""
    build, count = local.LibraryBuilder.build, iter(range(10**6))

    def poisoned(self: local.LibraryBuilder, module: tvm.IRModule, name: str = "", plain: bool = False) -> Path:
        path = build(self, module, name, plain)
        kind = ("build", "wrong", "hang", "")[next(count) % 4] if not name else ""
        if kind == "build":
            raise local.CandidateFailure("build", "error: no such luck")
        if kind:
            path.write_bytes(compile_library(poison(get_unscheduled_function(module), kind), resolve("cpu")[0]))
        return path

    monkeypatch.setattr(local.LibraryBuilder, "build", poisoned)
    monkeypatch.setattr(trial_of_one, "RUN_SECONDS", 1.0)
    tuning = lowering.tune(matmul(rows=16), tmp_path / "database", trials=8)
    causes = {cause for o in tuning.outcomes for cause in o.failures}
    assert causes == {"build", "wrong", "hang"}
    failed = [trial.candidate for trial in read_journal(tuning.database) if trial.cause is not None]
    assert len(failed) == sum(sum(o.failures.values()) for o in tuning.outcomes)
    assert not {read_trace_choice(r.trace) for r in read_best_records(tuning.database)} & set(failed)
    module = lowering.compile(matmul(rows=16), database=tmp_path / "database")
    x = np.ones((16, 96), np.float32)
    np.testing.assert_allclose(module.run({"x": x})["y"], expected(matmul(), x), rtol=1e-4, atol=1e-7)


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """A second process continues from the records of one that was killed, though its last line is torn."""
    onnx.save(matmul(rows=32), tmp_path / "model.onnx")
    command = [sys.executable, "-m", "lowering", "tune", "model.onnx", "--database", "database"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "--budget", "10m"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    lines = 0
    end = time.monotonic() + 120
    while lines < 6 and time.monotonic() < end:
        time.sleep(0.2)
        files = list(tmp_path.glob("database/*/trials/database_tuning_record.json"))
        lines = len(files[0].read_text().splitlines()) if files else 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lines >= 6
    with files[0].open("a") as file:
        file.write('[0, [[["Sample')
    done = subprocess.run([*command, "--trials", "2"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert trials(tmp_path / "database") >= lines
    assert "records: database" in done.stdout and "a run 1." in done.stdout


def test_an_interrupt_keeps_what_was_found(tmp_path: Path) -> None:
    def interrupt(state: TuningState) -> None:
        if state.at_work is not None and state.at_work.trials == 3 and state.step == "searching":
            raise KeyboardInterrupt

    tuning = lowering.tune(matmul(rows=8), tmp_path, budget=300, progress=interrupt)
    assert tuning.interrupted and max(o.trials for o in tuning.outcomes) == 3
    module = lowering.compile(matmul(rows=8), database=tmp_path)
    assert all(kernel.source for kernel in module.manifest.kernels)


def test_what_there_was_no_time_for_is_said(tmp_path: Path) -> None:
    tuning = lowering.tune(matmul(rows=8), tmp_path, budget=0.1)
    assert {o.why for o in tuning.outcomes} == {"the time was over before it was begun"} and tuning.gain == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ({"trials": -1}, "trials"),
        ({"budget": 0}, "budget=0"),
        ({"effort": "some"}, "effort='some'"),
        ({"threads": 0}, "threads"),
        ({"sizes": [{}]}, "'n'"),
        ({"sizes": [{"m": 1}]}, "'m'"),
    ],
)
def test_numbers_that_make_no_sense(options: dict, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        lowering.tune(matmul(), tmp_path / "database", **options)


def test_a_database_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises("database.unwritable"):
        lowering.tune(matmul(), tmp_path / "file", budget=5)
    database = TuningDatabase(tmp_path, resolve("cpu")[0])
    (database.folder / "best" / "database_workload.json").write_text("[nothing]\n")
    with raises("database.file_damaged"):
        lowering.compile(matmul(), database=tmp_path)


def test_the_nearest_size_counts() -> None:
    rows, keys = RuntimeSize(0, 0), RuntimeSize(1, None)
    a, b, c = (Choice(name, {}) for name in "abc")
    assert choose_by_size([rows], {(1,): a, (64,): a}) == a
    assert choose_by_size([rows, keys], {(1, 4): a, (64, 4): b}) == BySize(rows, 8, a, b)
    tree = choose_by_size([rows, keys], {(1, 100): a, (64, 100): b, (64, 6400): c})
    assert tree == BySize(keys, 800, BySize(rows, 8, a, b), c) or tree == BySize(rows, 8, a, BySize(keys, 800, b, c))
    assert choose_by_size([rows], {(0,): a, (1,): b}) == BySize(rows, 0, a, b)


def test_a_target_that_names_no_machine_finds_what_was_tuned_for_it(tmp_path: Path) -> None:
    """Any machine may measure: here this one, and `cpu` does not ask for features above its level."""
    lowering.tune(matmul(rows=8), tmp_path, f"cpu:{WIDEST}", trials=2)
    here, level = (set(resolve(target)[0].cpu_features) for target in ("cpu", f"cpu:{WIDEST}"))
    for target, tuned in ((f"cpu:{WIDEST}", True), ("cpu", here == level)):
        kernels = lowering.compile(matmul(rows=8), target, database=tmp_path).manifest.kernels
        assert any(kernel.source.startswith("tuned") for kernel in kernels) == tuned
