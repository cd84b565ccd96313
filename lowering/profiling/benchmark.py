"""`bench`: how long a compiled model takes, kernel by kernel, beside what the machine can do."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import MOST_THREADS
from ..runtime import Model, load
from ..runtime.checks import check_integer
from ..runtime.profiler import KernelCall, Profiler
from .expected import seconds as expected_seconds
from .inputs import run_sizes, synthetic_inputs
from .limits import Limits, measure_gpu_limits, measure_limits
from .peer import onnxruntime
from .percentiles import Percentiles

_FEWEST, _MOST = 5, 1000
WARM_UP = 0.2
"""Seconds in which a model runs before it is measured."""


@dataclass(frozen=True)
class Cost:
    """Time, work, the time that was to be expected (expected.py), and the share of the machine's limit that
    the work is: the time that the limit allows, by that taken."""

    calls: int
    seconds: float
    flops: int
    bytes: int
    expected: float
    of_limit: float


@dataclass(frozen=True)
class TimedCall(KernelCall):
    """A call of a kernel with its time: the median of all runs."""

    seconds: float


@dataclass(frozen=True)
class Profile:
    """What `bench` measured.

    seconds is the median of whole runs, percentiles are those of them. cpu_seconds is the median of the time
    that all threads of the process took, which a noisy neighbor does not make longer. calls are the kernels of one
    run, in order; what is missing to the whole is the virtual machine, Python, and the memory of results. timeline has
    the begin of each in one run, the middle one by length, and how long it took there. peer is the median of the runs
    of another runtime, if there was one, which took turns with ours.
    """

    seconds: float
    percentiles: Percentiles
    cpu_seconds: float
    runs: int
    threads: int
    target: str
    sizes: dict[str, int]
    limits: Limits
    calls: tuple[TimedCall, ...]
    timeline: tuple[tuple[float, float], ...]
    peer: float | None = None

    def total(self) -> Cost:
        """All calls of a run, in the time of a whole run."""
        return self._cost(self.calls, self.seconds)

    def by_kind(self) -> dict[str, Cost]:
        """The calls by what they compute: "matmul", "attention" and "other"; the costliest first."""
        return self._grouped(lambda call: call.kernel.kind)

    def by_kernel(self) -> dict[str, Cost]:
        """The calls by kernel; the costliest first."""
        return self._grouped(lambda call: call.kernel.name)

    def cost(self, call: TimedCall) -> Cost:
        return self._cost([call], call.seconds)

    def to_data(self) -> dict[str, Any]:
        """Everything, with the sums by kind and by kernel, in what JSON has."""
        sums = {"by_kind": self.by_kind(), "by_kernel": self.by_kernel()}
        tables = {name: {key: dataclasses.asdict(cost) for key, cost in table.items()} for name, table in sums.items()}
        return {**dataclasses.asdict(self), **tables}

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=1) + "\n"

    def save_png(self, path: str | Path) -> None:
        """Draws the time of each kernel as a bar, and the time that the limit would allow in it. Needs matplotlib."""
        from .report import picture

        picture(self, Path(path))

    def trace(self) -> str:
        """One run as a timeline for ui.perfetto.dev: JSON in the Trace Event Format."""
        from .trace import trace

        return trace(self)

    def __str__(self) -> str:
        from .report import text

        return text(self)

    def __repr__(self) -> str:
        from .report import headline

        return f"Profile({headline(self)[0]})"

    def _repr_html_(self) -> str:
        from .report import html

        return html(self)

    def _grouped(self, key: Callable[[TimedCall], str]) -> dict[str, Cost]:
        groups: dict[str, list[TimedCall]] = {}
        for call in self.calls:
            groups.setdefault(key(call), []).append(call)
        costs = {name: self._cost(calls, sum(c.seconds for c in calls)) for name, calls in groups.items()}
        return dict(sorted(costs.items(), key=lambda item: -item[1].seconds))

    def _cost(self, calls: Iterable[TimedCall], seconds: float) -> Cost:
        calls = list(calls)
        least = sum(self.limits.seconds(c.flops, c.bytes) for c in calls)
        flops, size = (sum(getattr(c, name) for c in calls) for name in ("flops", "bytes"))
        expected = sum(expected_seconds(c.kernel, c.flops, c.bytes, self.limits) for c in calls)
        return Cost(len(calls), seconds, flops, size, expected, least / seconds)


def bench(
    model: Model | str | os.PathLike[str],
    sizes: Mapping[str, int] | None = None,
    inputs: Mapping[str, Any] | None = None,
    threads: int = 1,
    seconds: float = 2.0,
    against: str | os.PathLike[str] | None = None,
    warm_up: float = WARM_UP,
) -> Profile:
    """Measures a compiled model, or an artifact folder; needs no compiler.

    sizes gives the model's symbolic dimensions by name, and with static_cache the number of tokens that the caches
    hold. inputs are arrays by name; the others are synthetic: floating-point numbers are normally distributed, integers
    and bools are 1, so that masks show everything. The model runs for `warm_up` seconds, once at least, before anything
    is measured. That takes at least about `seconds`, of which half are whole runs and half runs in which each kernel is
    timed; both take turns. The machine's limits are measured at the end, with as many
    threads (lowering/profiling/limits.py). For a model on a GPU, given arrays must be in its memory.

    against is the ONNX model that a CPU's artifact was compiled from: onnxruntime runs it on the same inputs, with as
    many threads, in turns with ours.

    Raises InputError where sizes are missing or not the model's, or onnxruntime cannot take part, and ArtifactError for
    what `load` refuses.
    """
    if not isinstance(model, Model):
        model = load(Path(model))
    given = dict(inputs or {})
    sizes = run_sizes(model.manifest, sizes or {}, given)
    arrays = synthetic_inputs(model, sizes, given)
    threads = check_integer(threads, "threads", 1, MOST_THREADS)
    peer = None
    if against is not None:
        if model.gpu is not None:
            raise InputError("onnxruntime is measured on CPUs, and this artifact is for GPUs.")
        peer = onnxruntime(against, model.manifest, arrays, threads)
    call = model.bind(arrays, threads=threads)
    profiler = Profiler(model)
    warm_up_by(call, model, warm_up)
    wall: list[float] = []
    cpu: list[float] = []
    theirs: list[float] = []
    begin = time.perf_counter()
    while len(wall) < _FEWEST or (time.perf_counter() - begin < seconds and len(wall) < _MOST):
        start, busy = time.perf_counter(), time.process_time()
        call()
        model.wait()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
        with model.instrumented(profiler):
            profiler.start()
            call()
        if peer is not None:
            start = time.perf_counter()
            peer()
            theirs.append(time.perf_counter() - start)
    times = np.median(np.array(profiler.times), axis=0) / 1e9
    calls = tuple(TimedCall(c.kernel, c.nodes, c.flops, c.bytes, float(t)) for c, t in zip(profiler.calls, times))
    percentiles = Percentiles.of(wall)
    read = sum(c.bytes for c in calls)
    limits = measure_limits(threads, read) if model.gpu is None else measure_gpu_limits(model.gpu)
    taken, other = float(np.median(cpu)), float(np.median(theirs)) if theirs else None
    kept = int(np.argsort([sum(each) for each in profiler.times])[len(profiler.times) // 2])
    spans = zip(profiler.begins[kept], profiler.times[kept])
    timeline = tuple((begin / 1e9, nanoseconds / 1e9) for begin, nanoseconds in spans)
    target, runs = model.manifest.target, len(wall)
    return Profile(percentiles.p50, percentiles, taken, runs, threads, target, sizes, limits, calls, timeline, other)


def warm_up_by(call: Callable[[], object], model: Model, seconds: float) -> None:
    """Call it for that many seconds, once at least, and wait for each call."""
    end = time.perf_counter() + seconds
    while True:
        call()
        model.wait()
        if time.perf_counter() >= end:
            return
