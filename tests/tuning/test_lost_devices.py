"""When the last device goes, all waiting calls are told so, and earlier results are stored."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowering.errors import InputError
from lowering.fleet import devices
from lowering.measuring.measure import Measurement
from lowering.tuning import local
from lowering.tuning.search import scheduler
from tests.support.error_codes import raises


class LateQueue(queue.SimpleQueue[Any]):
    """A queue whose last worker ends during a put."""

    def put(self, item: Any, *_: Any) -> None:
        worker = threading.Thread(target=self.fleet._work, daemon=True)  # type: ignore[attr-defined]
        worker.start()
        worker.join(0.3)
        super().put(item)


def test_what_is_submitted_as_the_last_device_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_ATTEMPTS", 0)  # a worker that has given up
    fleet = devices.Fleet.__new__(devices.Fleet)
    fleet.key, fleet._left, fleet._lock, fleet._queue = "here", 1, threading.Lock(), LateQueue()
    fleet._queue.fleet = fleet  # type: ignore[attr-defined]
    for _ in range(2):  # while it goes, and after it
        done = fleet.submit(Path("a.so"), Path("b.so"), 1, trial=True)
        assert isinstance(done.exception(10), InputError)


def measuring(seconds: float | None, path: Path) -> local.TrialFuture:
    """Return the future of a measurement that ends in seconds, or without a device."""
    done: Future[Measurement] = Future()
    if seconds is None:
        done.set_exception(InputError("fleet.no_device_left", "No device is left."))
    else:
        done.set_result(Measurement(1.0, (seconds,), 0.0))
    return local.TrialFuture(path, done, 1.0)


@pytest.mark.parametrize(
    "ends", [(None, 2.0), (2.0, None), (None, 2.0, None, 3.0), (1.0, None, None), (None, None), (None,)]
)
def test_other_measurements_are_stored(
    ends: Sequence[float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "predicted", lambda *_: 0.0)
    stored: list[float] = []
    database = SimpleNamespace(commit=lambda module, trace, seconds, *_: stored.append(seconds))
    search = SimpleNamespace(site=SimpleNamespace(database=database), timings={}, model=None, context=None, module=None)
    batch = scheduler._CandidateBatch.__new__(scheduler._CandidateBatch)
    batch.search, batch._results, batch._new_indices = search, [], []
    candidate = SimpleNamespace(sch=SimpleNamespace(trace=None))
    batch._pending = [(candidate, str(k), measuring(seconds, tmp_path / str(k))) for k, seconds in enumerate(ends)]
    with raises("fleet.no_device_left"):
        batch.finish(None, lambda search: None)
    assert stored == [seconds for seconds in ends if seconds] and not batch._pending
