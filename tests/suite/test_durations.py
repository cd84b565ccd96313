"""Durations are written for each test, and a run beyond its budget fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .durations import SLOWEST, Duration, _measure_cpu, sum_slowest

TESTS = """
import time

def test_cheap():
    pass

def test_expensive():
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
"""
BUSY_CHILD = """
import sys
import time

while time.process_time() < 0.5:
    pass
print("done", flush=True)
sys.stdin.read()
"""
PLUGIN = """
import sys
sys.path.append({folder!r})
from tests.suite import durations

pytest_addoption = durations.add_options

def pytest_configure(config):
    config.pluginmanager.register(durations.Durations(config))
"""


def run_pytest(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(PLUGIN.format(folder=str(Path(__file__).parents[2])))
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--durations-to", "log/durations.jsonl", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return result.returncode, result.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_beyond_its_budget_fails(tmp_path: Path, workers: str) -> None:
    status, output = run_pytest(tmp_path, "-n", workers, "--budget", "0.2")
    assert status == 1 and "2 passed" in output and "budget: 0" in output
    assert run_pytest(tmp_path, "-n", workers, "--budget", "60")[0] == 0


@pytest.mark.parametrize("workers", ["0", "2"])
def test_all_durations_are_written_slowest_first(tmp_path: Path, workers: str) -> None:
    status, output = run_pytest(tmp_path, "-n", workers)
    lines = [json.loads(line) for line in (tmp_path / "log" / "durations.jsonl").read_text().splitlines()]
    assert status == 0 and "slowest tests" in output
    assert [line["test"] for line in lines] == ["test_it.py::test_expensive", "test_it.py::test_cheap"]
    assert lines[0]["cpu_seconds"] >= 0.4 and lines[0]["seconds"] >= 0.5 and lines[1]["cpu_seconds"] < 0.4


def test_children_count_before_they_end() -> None:
    before = _measure_cpu()
    child = subprocess.Popen([sys.executable, "-c", BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    assert _measure_cpu() - before >= 0.4
    child.communicate()
    assert _measure_cpu() - before >= 0.4


def test_the_budget_is_for_the_slowest() -> None:
    durations = [Duration(str(number), cpu_seconds=float(number)) for number in range(100)]
    assert sum_slowest(durations) == sum(range(100 - SLOWEST, 100))
