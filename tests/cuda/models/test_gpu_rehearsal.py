"""measure.py from beginning to end without a GPU: every kind of job, and kernels that hang, end and are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.plan import read
from benchmarks.gpu.report import table
from benchmarks.gpu.results import KINDS
from benchmarks.gpu.results import read as read_results
from tests.cuda_emulation.processes import environment

BUILD = Path(__file__).with_name("rehearsed.py")
MEASURE = """
import pathlib, sys
from benchmarks.gpu.host.measure import main
main(pathlib.Path(sys.argv[1]), sys.argv[2:])
"""
LIMIT = 100  # seconds of a job: the wait for the kernel that hangs

# Seven models are compiled for the emulation; torch and transformers are needed.
pytestmark = [pytest.mark.no_gpu, pytest.mark.slow, pytest.mark.timeout(3600)]

SANITIZER = """\
#!/bin/sh
while [ "$1" != "$PYTHON" ]; do echo "$1"; shift; done
"$@" && echo "ERROR SUMMARY: 0 errors"
"""
"""Says its options, and runs the program."""


def run(*command: object, path: Path) -> str:
    """Return the output of a command that takes the emulation for a GPU, and finds programs in a folder first."""
    emulation = environment("sm_90a")
    programs = {"PATH": f"{path}{os.pathsep}{emulation['PATH']}", "PYTHON": sys.executable}
    here = {**os.environ, **emulation, **programs, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, *map(str, command)], env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a bundle. Its folder has results in `out`, a copy of them in `copy`, and the output in `said`."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    bundle = tmp_path_factory.mktemp("rehearsal")
    tool = bundle / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    run(BUILD, bundle, path=tool.parent)
    options = ["--rehearse", "--minutes", 60, "--limit", LIMIT, "--copy", bundle / "copy"]
    (bundle / "said").write_text(run("-c", MEASURE, bundle, "--out", bundle / "out", *options, path=tool.parent))
    return bundle


@pytest.fixture(scope="module")
def record(folder: Path) -> dict[str, Any]:
    (path,) = (folder / "out").glob("*.json")
    assert (folder / "copy" / path.name).read_text() == path.read_text()
    return json.loads(path.read_text())["found"]


def test_every_kind_of_job_has_an_answer(record: dict[str, Any]) -> None:
    assert {kind for kind in KINDS if record[kind]} == set(KINDS)
    problems = {
        f"{kind}: {name}": entry["problem"]
        for kind, entries in record.items()
        for name, entry in entries.items()
        if "problem" in entry
    }
    assert set(problems) == {"checks: wrong", "checks: dying", "checks: hanging"}, problems


def test_a_fault_costs_its_own_fact(record: dict[str, Any]) -> None:
    checks, contenders = record["checks"], record["cases"]["decode"]
    assert "wrong at" in checks["wrong"]["problem"]
    assert "died" in checks["dying"]["problem"]
    assert "no answer" in checks["hanging"]["problem"]
    assert all(contenders[name]["problem"] == checks[name]["problem"] for name in ("wrong", "dying", "hanging"))
    for contender in ("decode", "k16w2s2p64m1", "math"):
        assert contenders[contender]["error"] < 2e-3 and contenders[contender]["timing"]["median"] > 0
    assert "problem" in contenders["flashinfer"], "the bundle lacks its library"


def test_a_fault_while_others_are_timed_costs_one_contender(folder: Path, tmp_path: Path) -> None:
    """A kernel passes its checks and then ends the process."""
    (path,) = (folder / "out").glob("*.json")
    data = json.loads(path.read_text())
    data["found"]["checks"]["dying"] = {"error": 0.0}
    del data["found"]["cases"]["decode"]
    (tmp_path / path.name).write_text(json.dumps(data))
    run("-c", MEASURE, folder, "--out", tmp_path, "--rehearse", "--limit", LIMIT, "decode", path=folder / "bin")
    contenders = read_results(tmp_path / path.name).found["cases"]["decode"]
    assert "died" in contenders["dying"]["problem"]
    assert contenders["decode"]["timing"]["median"] > 0 and contenders["math"]["timing"]["median"] > 0


def test_programs_are_right_and_timed(record: dict[str, Any]) -> None:
    assert record["models"]["exp"]["error"] < 2e-3
    assert set(record["weights"]) == {"float16", "int4"} and set(record["flex"]) == {"documents", "documents by blocks"}
    assert set(record["experts"]) == {"8 experts"}
    assert len(record["decoders"]) == 2
    for kind in ("weights", "experts", "flex", "decoders"):
        for entry in record[kind].values():
            assert entry["times"] and all(timing["median"] > 0 for timing in entry["times"].values())
    for tool in ("memcheck", "synccheck", "racecheck"):
        assert record["sanitizer"][f"{tool} update"] == {"note": "ERROR SUMMARY: 0 errors"}
    steps = record["steps"]
    assert len(steps["llama-3.2-1b tokens"]["rounds"]) == 3
    assert steps["llama-3.2-1b time"]["ours"]["timing"]["median"] > 0
    assert steps["llama-3.2-1b profile"]["kernels"]


def test_the_report_has_all_of_it(folder: Path, record: dict[str, Any]) -> None:
    (path,) = (folder / "out").glob("*.json")
    shown = table(read(folder), read_results(path))
    assert shown in (folder / "said").read_text()
    for said in (
        "best of decode:",
        "step of llama-3.2-1b tokens",
        "from first to last",
        "missing: flashinfer",
        "limits:",
    ):
        assert said in shown
    for heading in (
        "weights  ",
        "experts  ",
        "9 tokens, us",
        "flex  ",
        "decoders  ",
        "1 rows, us",
        "step, us",
        "step of 5, us",
    ):
        assert heading in shown
