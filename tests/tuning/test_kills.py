"""`tune` is killed at random moments, twenty times: its database stays whole, and the next run continues from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest

import lowering
from lowering.tuning import upkeep
from lowering.tuning_records.database import BEST, TRIALS, open_database, read_journal
from lowering.tuning_records.shared_records import RECORDS, WORKLOADS
from tests.tuning.models import matmul

ROOT = Path(__file__).parents[2]
KILLS = 20


def files(database: Path) -> dict[Path, list[bytes]]:
    """Return the whole lines of files that only grow."""
    names = (f"*/{TRIALS}/{RECORDS}", f"*/{TRIALS}/{WORKLOADS}", f"*/{BEST}/{RECORDS}", f"*/{BEST}/{WORKLOADS}")
    paths = [path for name in (*names, "*/journal.jsonl") for path in database.glob(name)]
    return {path: path.read_bytes().split(b"\n")[:-1] for path in paths}


def check_whole(database: Path) -> int:
    """Check that all records of a database can be read, and count them."""
    count = 0
    for path in sorted(database.glob("*/architecture.json")):
        count += sum(
            record.run_secs is not None for record in open_database(path.parent / TRIALS).get_all_tuning_records()
        )
        assert len(read_journal(path.parent)) >= count
    return count


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills(tmp_path: Path) -> None:
    """Kill the process by itself, or with its helpers, which end with it."""
    rng = np.random.default_rng(0)
    onnx.save(matmul(rows=32), tmp_path / "model.onnx")
    database = tmp_path / "database"
    command = [sys.executable, "-m", "lowering", "tune", "model.onnx", "--database", "database"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    before: dict[Path, list[bytes]] = {}
    counts = []
    for kill in range(KILLS):
        process = subprocess.Popen(
            [*command, "--budget", "10m", "--seed", str(kill)],
            cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        wait_for_lines(database, kill % 4, process)
        time.sleep(float(rng.uniform(0, 3 if kill % 4 else 12)))
        if kill % 2:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        wait_for_helpers(process.pid)
        after = files(database)
        for path, lines in before.items():
            assert after[path][: len(lines)] == lines, path
        before = after
        counts.append(check_whole(database))
        print(f"kill {kill}: {counts[-1]} records", flush=True)
    assert counts == sorted(counts) and counts[-1] > 0
    done = subprocess.run([*command, "--trials", "2"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert check_whole(database) >= counts[-1] and upkeep.summarize_database(database)
    module = lowering.compile(matmul(rows=32), database=database)
    assert all(kernel.source for kernel in module.manifest.kernels)


def wait_for_lines(database: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until so many lines have been added to the journal."""
    before, end = journal_lines(database), time.monotonic() + 240
    while journal_lines(database) < before + count:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def journal_lines(database: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in database.glob("*/journal.jsonl"))


def wait_for_helpers(session: int) -> None:
    """Wait until no process of a session is left."""
    end = time.monotonic() + 60
    while left := [p.name for p in Path("/proc").iterdir() if p.name.isdigit() and is_of(p, session)]:
        assert time.monotonic() < end, f"processes {left} outlive the tuner"
        time.sleep(0.1)


def is_of(process: Path, session: int) -> bool:
    try:
        state, _, _, its = (process / "stat").read_text().rsplit(")", 1)[1].split()[:4]
    except OSError:  # it has ended
        return False
    return int(its) == session and state != "Z"
