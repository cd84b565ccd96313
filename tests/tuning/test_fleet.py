"""Tuning on devices of a tracker, all of them on this machine: two servers, one of which is killed meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from tvm.rpc import connect_tracker
from tvm.rpc.tracker import Tracker

import lowering
from lowering.errors import InputError
from lowering.fleet import devices as fleet
from lowering.tuning.search.session import TuningState
from lowering.tuning_records.database import read_journal
from tests.cuda_emulation.processes import environment
from tests.support.error_codes import raises
from tests.tuning.models import matmul

ROOT = Path(__file__).parents[2]

# The program of a device, which has TVM's runtime but no compiler.
DEVICE = """
import sys
sys.modules["onnx"] = sys.modules["onnx_ir"] = sys.modules["schedules"] = None
from lowering.commands.cli import main
sys.exit(main(["device", "--tracker", sys.argv[1], "--key", sys.argv[2]]))
"""


def started() -> Tracker:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Tracker("127.0.0.1", port, port + 20, silent=True)


@pytest.fixture(scope="module")
def tracker() -> Iterator[tuple[str, int]]:
    tracker = started()
    yield "127.0.0.1", tracker.port
    tracker.terminate()


class Device:
    """A server that is registered at once. `variables` are added to the environment."""

    def __init__(self, tracker: tuple[str, int], key: str, variables: Mapping[str, str] | None = None) -> None:
        before = self._count(tracker, key)
        command = [sys.executable, "-c", DEVICE, f"{tracker[0]}:{tracker[1]}", key]
        here = {**os.environ, **(variables or {}), "TVM_USE_RUNTIME_LIB": "1"}
        self.process = subprocess.Popen(command, cwd=ROOT, env=here, stdout=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + 60
        while self._count(tracker, key) <= before:
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.1)

    @staticmethod
    def _count(tracker: tuple[str, int], key: str) -> int:
        return sum(info["key"] == f"server:{key}" for info in connect_tracker(*tracker).summary()["server_info"])

    def kill(self) -> None:
        """Kill it with all of its processes, like a machine that loses its power."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def lose_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for an answer that does not come. A device starts more slowly on a busy machine."""
    monkeypatch.setattr(fleet, "RUN_SECONDS", 3.0)
    monkeypatch.setattr(fleet, "_PATIENCE", 6.0)


def test_two_devices_one_of_which_dies(
    tracker: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [Device(tracker, "here") for _ in range(2)]
    seen: list[int] = []

    def kill_one(state: TuningState) -> None:
        seen.append(sum(search.trials for search in state.searches))
        if seen[-1] >= 4:
            lose_patience(monkeypatch)
            devices[0].kill()

    try:
        tuning = lowering.tune(matmul(rows=64), tmp_path, trials=10, tracker=tracker, keys=["here"], progress=kill_one)
    finally:
        for device in devices:
            device.kill()
    assert sum(o.trials for o in tuning.outcomes) >= 10
    assert not any(o.failures or o.why for o in tuning.outcomes)
    (folder,) = tmp_path.iterdir()
    trials = read_journal(folder)
    assert len(trials) >= 12 and all(trial.seconds for trial in trials)  # with two defaults
    module = lowering.compile(matmul(rows=64), database=tmp_path)
    assert all(kernel.source.startswith("tuned") for kernel in module.manifest.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_all_devices_die_and_their_tracker(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error says so, all measured results stay, and tuning continues elsewhere."""
    own_tracker = started()
    address = ("127.0.0.1", own_tracker.port)
    devices = [Device(address, "here") for _ in range(count)]
    seen: list[int] = []

    def kill_all(state: TuningState) -> None:
        seen.append(sum(search.trials for search in state.searches))
        if seen[-1] >= 4:
            lose_patience(monkeypatch)
            own_tracker.proc.kill()
            for device in devices:
                device.kill()

    try:
        with pytest.raises(InputError, match="No device with the key 'here' is left"):
            lowering.tune(matmul(rows=64), tmp_path, tracker=address, keys=["here"], progress=kill_all)
    finally:
        own_tracker.proc.kill()
        for device in devices:
            device.kill()
    (folder,) = tmp_path.iterdir()
    before = read_journal(folder)
    assert len(before) >= 4 and all(trial.seconds for trial in before)
    lowering.tune(matmul(rows=64), tmp_path, trials=2)
    after = read_journal(folder)
    assert after[: len(before)] == before and len(after) > len(before)


@pytest.mark.slow
def test_two_keys_in_one_session(tracker: tuple[str, int], tmp_path: Path) -> None:
    """Both are this machine, so that results of the second belong to the first one's architecture, too."""
    devices = [Device(tracker, key) for key in ("one", "other")]
    try:
        tuning = lowering.tune(matmul(rows=64), tmp_path, trials=4, tracker=tracker, keys=["one", "other"])
    finally:
        for device in devices:
            device.kill()
    assert len(tuning.outcomes) == 6 and len({o.architecture for o in tuning.outcomes}) == 1
    assert sum(o.trials for o in tuning.outcomes) >= 4 and not any(o.failures for o in tuning.outcomes)


@pytest.mark.slow
def test_a_rack_of_gpus(tracker: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cards of one kind, both emulated, and a device without a card."""
    gpu = environment("sm_80")
    monkeypatch.setenv("PATH", gpu["PATH"])
    cards, plain = [Device(tracker, "card", gpu) for _ in range(2)], Device(tracker, "plain")
    options = {"target": "cuda:sm_80", "trials": 4, "tracker": tracker}
    try:
        tuning = lowering.tune(matmul(rows=8), tmp_path, keys=["card"], effort="quick", **options)
        with pytest.raises(InputError, match=r"key 'plain' have no usable GPU: this machine has no"):
            lowering.tune(matmul(rows=8), tmp_path, keys=["plain"], **options)
        with pytest.raises(InputError, match="with the key 'card' are sm_80, not sm_90a"):
            lowering.tune(matmul(rows=8), tmp_path, keys=["card"], **options | {"target": "cuda:sm_90a"})
    finally:
        for device in (*cards, plain):
            device.kill()
    assert sum(o.trials for o in tuning.outcomes) >= 4 and not any(o.failures or o.why for o in tuning.outcomes)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("sm_80-CPU_emulation") and all(trial.seconds for trial in read_journal(folder))


def test_refusals(tracker: tuple[str, int], tmp_path: Path) -> None:
    with raises("fleet.device_missing"):
        lowering.tune(matmul(rows=64), tmp_path, tracker=tracker, keys=["nobody"])
    with raises("tune.key_missing"):
        lowering.tune(matmul(rows=64), tmp_path, tracker=tracker)
    with raises("fleet.tracker_unreachable"):
        lowering.tune(matmul(rows=64), tmp_path, tracker=("127.0.0.1", 1), keys=["here"])
