"""On several threads a contender has a process of its own, which takes no core while others have their turns."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.cases.attention import AttentionCase
from benchmarks.isolated import Failed, Isolated
from benchmarks.measure import prepare
from benchmarks.records import here
from benchmarks.run import _results

ROOT = Path(__file__).parents[2]
TINY = AttentionCase(name="P1 full", group="attention", S=3, T=5, D=8)


def state(pid: int) -> str:
    """T is stopped, Z ended and not yet waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Spinner:
    """Something with a thread that never waits."""

    def __init__(self, refuse: bool = False) -> None:
        if refuse:
            raise RuntimeError("no such operator\nand more")

    def spin(self) -> None:
        def forever() -> None:
            while True:
                zlib.crc32(bytes(1 << 24))  # as libraries spin, without Python's lock

        threading.Thread(target=forever, daemon=True).start()

    def spins(self) -> float:
        """CPU seconds while this method sleeps."""
        start = time.process_time()
        time.sleep(0.2)
        return time.process_time() - start

    def die(self) -> None:
        os._exit(3)

    def wrong(self) -> None:
        raise ValueError("is wrong")


def test_what_spins_stands_still_between_questions() -> None:
    isolated = Isolated(Spinner)
    try:
        isolated.ask("spin")
        assert isolated.ask("spins") > 0.01
        before = cpu_seconds(isolated.pid)
        assert state(isolated.pid) == "T"
        time.sleep(0.3)
        assert cpu_seconds(isolated.pid) == before
        assert isolated.ask("spins") > 0.01  # and goes on
    finally:
        isolated.close()
    assert not Path(f"/proc/{isolated.pid}").exists()


def test_failures_say_what_happened() -> None:
    for arguments, method, message in (
        ([True], "spin", "RuntimeError: no such operator"),
        ([], "wrong", "ValueError: is wrong"),
        ([], "die", "the process died with exit status 3"),
    ):
        isolated = Isolated(Spinner, *arguments)
        try:
            with pytest.raises(Failed, match=f"^{message}$"):
                isolated.ask(method)
        finally:
            isolated.close()


def test_nothing_stopped_outlives_a_killed_parent() -> None:
    code = """
import os, signal
from benchmarks.isolated import Isolated
print(Isolated(int, 1).ask("conjugate"), flush=True)
isolated = Isolated(int, 1)
isolated.ask("conjugate")
print(isolated.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    answer, pid = done.stdout.split()
    assert answer == "1", done.stderr
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or state(int(pid)) == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the process is still there")


class Watched:
    """A peer that spins after its call, says where it is, and in its own turn looks what the others do.

    Its form on one thread is in the same process; another form is not.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def forms(self, case: AttentionCase) -> dict[str, peers.Form]:
        names = {"a": 2, f"a{peers.ONE_THREAD}": 1, "b": 2}
        return {form: peers.Form(partial(self._make, case, form), n) for form, n in names.items()}

    def _make(self, case: AttentionCase, form: str) -> peers.Contender:
        Spinner().spin()
        (self.folder / f"{self.name} {form}.pid").write_text(str(os.getpid()))
        answer, log = case.expected()["Y"], self.folder / f"{self.name} {form}.seen"

        def call() -> Any:
            pids = {path.read_text() for path in self.folder.glob("*.pid")} - {str(os.getpid())}
            with log.open("a") as file:
                file.write("".join(state(int(pid)) for pid in pids))
            return answer

        return peers.Contender(call, lambda result: {"Y": result})


def test_others_stand_still_while_one_is_timed(tmp_path: Path) -> None:
    openers = {name: partial(Watched, name, tmp_path) for name in ("onnxruntime", "openvino")}
    prepared = prepare(TINY, {name: opener() for name, opener in openers.items()}, openers, threads=2)
    record = prepared.measure(turns=2, seconds=1e-4)
    assert [(o.contender, o.form, o.threads) for o in record.outcomes[:3]] == [
        ("onnxruntime", "a", 2),
        ("onnxruntime", "a, one thread", 1),
        ("onnxruntime", "b", 2),
    ]
    assert all(o.timing is not None and o.error == 0 for o in record.outcomes) and len(record.outcomes) == 6
    assert record.limit() is not None
    pids = {path.stem: path.read_text() for path in tmp_path.glob("*.pid")}
    assert pids["openvino a"] == pids["openvino a, one thread"] and len(set(pids.values())) == 4
    seen = "".join(path.read_text() for path in tmp_path.glob("*.seen"))
    assert len(seen) > 50 and set(seen) == {"T"}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_figures_of_shared_processes_are_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = here(2)
    results.write(path)
    assert _results(argparse.Namespace(threads=2, target="cpu", out=path)).apart
    results.apart = False
    results.write(path)
    with pytest.raises(SystemExit, match="shared a process"):
        _results(argparse.Namespace(threads=2, target="cpu", out=path))
