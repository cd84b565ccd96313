"""Comparison of whole runs of a model with defaults and with winners, in alternating order.

A kernel that runs alone finds caches and branch predictors as it left them itself; in a model other kernels ran before.
Needs only the runtime.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...measuring.measure import Measurement
from ...profiling.inputs import synthetic_inputs
from ...runtime import load
from ...runtime.profiler import Profiler
from ..capture import CallSignature, record_calls

_MIN_ROUNDS, _MAX_ROUNDS = 7, 200


@dataclass(frozen=True)
class WholeRunTimes:
    """Times of the changed model relative to the original one.

    runs are those of whole runs, and calls those of each kernel's calls with arguments of the same shapes.
    """

    runs: Measurement
    calls: dict[CallSignature, Measurement]


def compare_whole_runs(was: str, became: str, sizes: Mapping[str, int], threads: int, seconds: float) -> WholeRunTimes:
    """Compare the models in two folders for about so many seconds.

    Half of the runs time each kernel.
    """
    runners = [_ModelRunner(Path(folder), sizes, threads) for folder in (was, became)]
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < _MIN_ROUNDS or (time.perf_counter() < end and rounds < _MAX_ROUNDS):
        for runner in runners if rounds % 2 else reversed(runners):
            runner.run_round()
        rounds += 1
    old_times, new_times = (runner.read_call_times() for runner in runners)
    calls = {call: _compare_times(old_times[call], new_times[call]) for call in old_times if call in new_times}
    return WholeRunTimes(_compare_times(*(np.array(runner.seconds) for runner in runners)), calls)


class _ModelRunner:
    """One of the models, with its timed runs."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], threads: int) -> None:
        self._model = load(folder)
        inputs = synthetic_inputs(self._model, sizes)
        self._calls = record_calls(self._model, inputs, threads)
        self._run = self._model.bind(inputs, threads=threads)
        self._profiler = Profiler(self._model)
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self.seconds: list[float] = []

    def run_round(self) -> None:
        """Run once, and once more with timed kernels."""
        begin = self._clock()
        self._run()
        self.seconds.append(self._clock() - begin)
        with self._model.instrumented(self._profiler):
            self._profiler.start()
            self._run()

    def read_call_times(self) -> dict[CallSignature, np.ndarray]:
        """Return the seconds of each round by call."""
        times = np.array(self._profiler.times) / 1e9
        times_by_call: dict[CallSignature, np.ndarray] = {}
        for index, call in enumerate(self._calls):
            times_by_call[call] = times_by_call.get(call, 0.0) + times[:, index]
        return times_by_call


def _compare_times(was: np.ndarray, became: np.ndarray) -> Measurement:
    return Measurement(float(np.median(was)), tuple((became / was).tolist()), 0.0)
