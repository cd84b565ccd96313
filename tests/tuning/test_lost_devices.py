"""Where the last device goes, whoever waits is told so, and what was measured until then is kept."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowering.errors import InputError
from lowering.fleet import devices
from lowering.tuning import scheduler


class LateQueue(queue.SimpleQueue[Any]):
    """The last worker ends while something is put into it."""

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
    for _ in range(2):  # while it goes, and behind it
        done = fleet.submit(Path("a.so"), Path("b.so"), 1, trial=True)
        assert isinstance(done.exception(10), InputError)


class Measuring:
    """A future of MetaSchedule's: seconds, or an error."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds

    def result(self) -> Any:
        if self.seconds is None:
            raise InputError("No device is left.")
        return SimpleNamespace(error_msg=None, run_secs=[self.seconds])


@pytest.mark.parametrize(
    "ends", [(None, 2.0), (2.0, None), (None, 2.0, None, 3.0), (1.0, None, None), (None, None), (None,)]
)
def test_what_was_measured_beside_it_is_kept(ends: Sequence[float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "predicted", lambda *_: 0.0)
    kept: list[float] = []
    database = SimpleNamespace(commit=lambda module, trace, seconds, *_: kept.append(seconds))
    search = SimpleNamespace(site=SimpleNamespace(database=database), known={}, model=None, context=None, module=None)
    batch = scheduler._Batch.__new__(scheduler._Batch)
    batch.search, batch._told, batch._new = search, [], []
    candidate = SimpleNamespace(sch=SimpleNamespace(trace=None))
    batch._begun = [(candidate, str(k), Measuring(seconds)) for k, seconds in enumerate(ends)]
    with pytest.raises(InputError, match="No device is left"):
        batch.finish(None, lambda search: None)
    assert kept == [seconds for seconds in ends if seconds] and not batch._begun
