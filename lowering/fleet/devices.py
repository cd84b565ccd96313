"""All devices under one key of a tracker: measurements go to whichever is free.

A device that dies or hangs in the middle is abandoned, and its measurement goes to another. A candidate with which two
devices were lost counts as a crash.
"""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..measuring.isolated import CandidateFailure
from ..measuring.machine import TuningMachine
from ..measuring.measure import Measurement
from ..measuring.trial import RUN_SECONDS
from .connection import Connection, LostError

_FILES = ("arguments.json", "arguments.bin", "expected.bin")
_PATIENCE = 30.0  # seconds for a device to be free, in addition to the limits of a candidate
_TRACKER_SECONDS = 10.0  # seconds for a tracker to answer
_MAX_LOSSES = 2  # devices that a candidate may cost
_ATTEMPTS = 3  # connections in a row that fail until a worker gives up


@dataclass
class _Work:
    library: Path
    baseline: Path
    pairs: int
    trial: bool
    done: Future[Measurement]
    losses: int = 0


class Fleet:
    """Measurements on devices, or on their GPUs; close it when done. threads is the number of a candidate's workers."""

    def __init__(self, tracker: tuple[str, int], key: str, threads: int, gpu: bool) -> None:
        """Raises InputError if the tracker does not answer, or has no device of that key, or one without GPU."""
        self.tracker, self.key, self._threads, self._gpu = tracker, key, threads, gpu
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        count = self._count_devices()
        if not count:
            raise InputError(
                "fleet.device_missing",
                f"The tracker at {tracker[0]}:{tracker[1]} has no device with the key '{key}'. Start `onnx-lowering "
                f"device --tracker {tracker[0]}:{tracker[1]} --key {key}` on one.",
            )
        first = Connection(tracker, key)
        try:
            self.described: dict[str, Any] = first.ask("machine", gpu, seconds=_PATIENCE)
        except LostError as error:
            raise InputError(
                "fleet.device_unreachable", f"No device with the key '{key}' can be reached: {error}."
            ) from error
        finally:
            first.close()
        if "missing" in self.described:
            raise InputError(
                "fleet.gpu_unusable", f"Devices with the key '{key}' have no usable GPU: {self.described['missing']}"
            )
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        self._lock, self._left = threading.Lock(), count
        for worker in self._workers:
            worker.start()

    @property
    def width(self) -> int:
        """Candidates that are measured concurrently."""
        return max(self._left, 1)

    @property
    def machine(self) -> TuningMachine:
        """The common properties of the devices: those of one key are alike."""
        return _machine(self.described)

    def submit(self, library: Path, baseline: Path, pairs: int, trial: bool) -> Future[Measurement]:
        """Measure a library compared with another one, in the folder of their arguments.

        The result may raise CandidateFailure, or InputError when no device is left.
        """
        work = _Work(library, baseline, pairs, trial, Future())
        with self._lock:  # the last worker abandons the queue, and nobody reads what is queued later
            if self._left:
                self._queue.put(work)
            else:
                work.done.set_exception(self._no_device_error())
        return work.done

    def close(self) -> None:
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join(timeout=1.0)

    def _count_devices(self) -> int:
        from tvm import rpc

        try:
            socket.create_connection(self.tracker, _TRACKER_SECONDS).close()  # TVM would try for a minute
            summary = rpc.connect_tracker(*self.tracker).summary()
        except (OSError, RuntimeError) as error:
            raise InputError(
                "fleet.tracker_unreachable", f"No tracker answers at {self.tracker[0]}:{self.tracker[1]}: {error}."
            ) from error
        return sum(info["key"] == f"server:{self.key}" for info in summary["server_info"])

    def _no_device_error(self) -> InputError:
        return InputError("fleet.no_device_left", f"No device with the key '{self.key}' is left.")

    def _work(self) -> None:
        """Run as one worker: a connection to a device, and its current measurement."""
        device: _Device | None = None
        failures = 0
        while failures < _ATTEMPTS and (work := self._queue.get()) is not None:
            try:
                device = device or _Device(self.tracker, self.key, self._gpu)
                if device.machine != self.machine:
                    what = "GPUs" if self._gpu else "caches"
                    raise InputError(
                        "fleet.devices_differ",
                        f"Devices with the key '{self.key}' have different {what}. Give each kind a key of its own.",
                    )
                work.done.set_result(device.measure(work, self._threads))
                failures = 0
            except (CandidateFailure, InputError) as error:
                work.done.set_exception(error)
                failures = 0
            except LostError as error:
                has_begun, device = device is not None and device.has_begun, None
                failures += not has_begun
                work.losses += has_begun
                if work.losses >= _MAX_LOSSES:
                    work.done.set_exception(
                        CandidateFailure("crash", f"{work.losses} devices were lost with it: {error}")
                    )
                else:
                    self._queue.put(work)
        if device is not None:
            device.close()
        with self._lock:
            self._left -= 1
            if not self._left:
                self._abandon()

    def _abandon(self) -> None:
        while True:
            try:
                work = self._queue.get_nowait()
            except queue.Empty:
                return
            if work is not None:
                work.done.set_exception(self._no_device_error())


class _Device:
    """A session on one device, and the folder of the task whose files it has."""

    def __init__(self, tracker: tuple[str, int], key: str, gpu: bool) -> None:
        """Raises LostError."""
        self._connection = Connection(tracker, key)
        self._folder: Path | None = None
        self.has_begun = False  # whether a candidate ran when it was lost
        described = self._ask("machine", gpu, seconds=_PATIENCE)
        self.machine = None if "missing" in described else _machine(described)

    def measure(self, work: _Work, threads: int) -> Measurement:
        """Measure a candidate. Raises CandidateFailure, and LostError, after which the device is unusable."""
        assert self.machine is not None
        self.has_begun = False
        folder = work.baseline.parent
        if folder != self._folder:
            for name in _FILES:
                self._upload(folder / name, name)
            self._upload(work.baseline, work.baseline.name)
            self._folder = folder
        if work.library != work.baseline:
            self._upload(work.library, work.library.name)
        job = {
            "library": work.library.name, "baseline": work.baseline.name, "folder": ".", "threads": threads,
            "pairs": work.pairs, "trial": work.trial, "cache": self.machine.largest, "gpu": bool(self.machine.gpu),
        }  # fmt: skip
        self.has_begun = True
        answer = self._ask("measure", job, seconds=2 * RUN_SECONDS + _PATIENCE)
        if "cause" in answer:
            raise CandidateFailure(answer["cause"], answer["text"])
        return Measurement(**answer | {"ratios": tuple(answer["ratios"])})

    def _upload(self, path: Path, name: str) -> None:
        self._ask("upload", str(path), name, seconds=_PATIENCE + path.stat().st_size / 1e6)

    def _ask(self, command: str, *arguments: Any, seconds: float) -> Any:
        try:
            return self._connection.ask(command, *arguments, seconds=seconds)
        except LostError:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()


def _machine(described: dict[str, Any]) -> TuningMachine:
    """Return the machine that a device's description names."""
    return TuningMachine(tuple(described["caches"]), described["gpu"])
