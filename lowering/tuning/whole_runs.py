"""Whether what won alone wins where it is used: runs of the whole model as it was and as it became, in turns.

Alone a kernel finds caches and branch predictors as it left them itself; in a model others have been there. Needs the
runtime alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..measuring.measure import Measured
from ..profiling.inputs import synthetic_inputs
from ..runtime import load
from ..runtime.profiler import Profiler
from .capture import Call, called

_FEWEST, _MOST = 7, 200


@dataclass(frozen=True)
class WholeRuns:
    """Times of a model as it became by those as it was: of whole runs, and of the calls of each kernel that have
    arguments of the same shapes."""

    runs: Measured
    calls: dict[Call, Measured]


def whole_runs(was: str, became: str, sizes: Mapping[str, int], threads: int, seconds: float) -> WholeRuns:
    """Of the models in two folders, for about so many seconds, half of them of runs whose kernels are timed."""
    sides = [_Side(Path(folder), sizes, threads) for folder in (was, became)]
    end, turns = time.perf_counter() + seconds, 0
    while turns < _FEWEST or (time.perf_counter() < end and turns < _MOST):
        for side in sides if turns % 2 else reversed(sides):
            side.turn()
        turns += 1
    one, other = (side.by_call() for side in sides)
    calls = {call: _compared(one[call], other[call]) for call in one if call in other}
    return WholeRuns(_compared(*(np.array(side.seconds) for side in sides)), calls)


class _Side:
    """One of the models, and its turns."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], threads: int) -> None:
        self._model = load(folder)
        inputs = synthetic_inputs(self._model, sizes)
        self._calls = called(self._model, inputs, threads)
        self._run = self._model.bind(inputs, threads=threads)
        self._profiler = Profiler(self._model)
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self.seconds: list[float] = []

    def turn(self) -> None:
        """A run, and one whose kernels are timed."""
        begin = self._clock()
        self._run()
        self.seconds.append(self._clock() - begin)
        with self._model.instrumented(self._profiler):
            self._profiler.start()
            self._run()

    def by_call(self) -> dict[Call, np.ndarray]:
        """Seconds of each turn."""
        times = np.array(self._profiler.times) / 1e9
        found: dict[Call, np.ndarray] = {}
        for place, call in enumerate(self._calls):
            found[call] = found.get(call, 0.0) + times[:, place]
        return found


def _compared(was: np.ndarray, became: np.ndarray) -> Measured:
    return Measured(float(np.median(was)), tuple((became / was).tolist()), 0.0)
