"""`pytest --gpu`, and recorded runs: with the emulated driver in place of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cuda_emulation.processes import environment
from tests.support import records_of_runs, seeds

pytestmark = pytest.mark.no_gpu

ROOT = Path(__file__).parents[3]

CONFTEST = """
from tests.support import records_of_runs
def pytest_addoption(parser): records_of_runs.add_options(parser)
def pytest_configure(config): config.pluginmanager.register(records_of_runs.Records(config))
"""
TESTS = """
import pytest
def test_passes(): print("passes")
def test_fails(): assert False, "as it should"
def test_new(): pass
@pytest.mark.slow
def test_slow(): pass
"""


def lines(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / records_of_runs.FILE).read_text().splitlines()]


def test_a_gpu_runs_what_the_emulation_would(tmp_path: Path) -> None:
    """Single kernels, and a model whose code is for an older architecture than the GPU's."""
    here = {**os.environ, **environment("sm_90a")}
    program = Path(here["PATH"].split(os.pathsep)[0]) / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 9.0\n")
    program.chmod(0o755)
    chosen = [
        "tests/cuda/elementwise/test_transpositions.py",
        "tests/cuda/elementwise/test_selection.py",
        "tests/cuda/elementwise/test_nans.py",
    ]
    options = ["--gpu", "--seed", "3", "--results", tmp_path, "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *chosen], cwd=ROOT, env=here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = lines(tmp_path)
    assert {line["outcome"] for line in records} == {"passed"} and {line["seed"] for line in records} == {"3"}
    assert {line["test"].partition("::")[0] for line in records} == set(chosen)


def run(folder: Path, *options: object) -> list[str]:
    """Return the tests that ran, in their order."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), seeds.VARIABLE: "7"}
    before = len(lines(folder / "runs")) if (folder / "runs").exists() else 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--results", folder / "runs", *options]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True)
    runs = lines(folder / "runs") if (folder / "runs" / records_of_runs.FILE).exists() else []
    return [line["test"].rpartition("::")[2] for line in runs[before:]]


@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_a_run_begins_with_what_failed_and_never_ran(processes: list[str], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: on request\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    assert run(tmp_path, "-k", "passes or fails", *processes) == ["test_passes", "test_fails"]
    assert run(tmp_path, *processes) == ["test_fails", "test_new", "test_slow", "test_passes"]
    failure = next(line for line in lines(tmp_path / "runs") if line["outcome"] == "failed")
    assert "as it should" in failure["text"] and failure["seed"] == "7"
    assert run(tmp_path, "--minutes", "0", *processes) == []


def test_a_seed_of_the_run_draws_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((np.random, "default_rng"), (seeds.random, "Random")):
        monkeypatch.setattr(module, name, getattr(module, name))  # which is put back

    def drawn(seed: str) -> tuple[int, int, float]:
        monkeypatch.setenv(seeds.VARIABLE, seed)
        seeds.renew()
        numbers, pair = np.random.default_rng(0), np.random.default_rng([1, 2])
        return int(numbers.integers(1 << 40)), int(pair.integers(1 << 40)), seeds.random.Random(5).random()

    assert drawn("1") == drawn("1")
    assert all(a != b for a, b in zip(drawn("1"), drawn("2")))
