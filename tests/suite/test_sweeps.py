"""Each slow test belongs to one sweep, and a sweep runs its tests alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import yaml

from . import sweeps

ROOT = Path(__file__).parents[2]


def list_tests(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", "--sample", "1", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in result.stdout.splitlines() if line.startswith("tests/")]


def test_a_slow_test_is_in_one_sweep() -> None:
    file = "tests/flex/test_hostile_arrays.py"
    slow = list_tests("-m", "slow", file)
    collected = [test for part in (1, 2) for test in list_tests("--sweep", f"flex-{part}", file)]
    assert len(slow) > 50 and Counter(collected) == Counter(slow)
    assert not list_tests("--sweep", "cuda-1", file)


def test_parts_are_alike_and_follow_moved_files() -> None:
    for folder, parts in sweeps.PARTS.items():
        names = [f"test_{number % 7}.py::test_case[{number}]" for number in range(1000)]
        found = Counter(sweeps.find_sweep(f"tests/{folder}/{name}") for name in names)
        assert set(found) <= set(sweeps.list_sweeps()) and len(found) == parts
        assert max(found.values()) < 1.3 * 1000 / parts
        assert all(
            sweeps.find_sweep(f"tests/{folder}/{n}") == sweeps.find_sweep(f"tests/{folder}/x/{n}") for n in names
        )
    assert sweeps.find_sweep("tests/test_a.py::test_b") == sweeps.find_sweep("tests/new/test_a.py::test_b") == "rest-1"


def test_all_parts_have_folders() -> None:
    assert all((ROOT / "tests" / folder).is_dir() for folder in sweeps.PARTS if folder != "rest")


def test_every_night_runs_each_sweep() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())
    job = workflow["jobs"]["sweep"]
    assert job["strategy"]["matrix"]["sweep"] == sweeps.list_sweeps()
    assert job["timeout-minutes"] > 120
    assert any(re.search(r"\.ci/run --sweep", step.get("run", "")) for step in job["steps"])
