"""`bench`: the run time of a compiled model, kernel by kernel, compared with the machine's limits."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..manifest import MAX_THREADS
from ..runtime import Model, load
from ..runtime.artifact.checks import check_integer
from ..runtime.profiler import KernelCall, Profiler
from .expected import seconds as expected_seconds
from .inputs import resolve_sizes, synthetic_inputs
from .limits import Limits, measure_gpu_limits, measure_limits
from .peer import load_onnxruntime
from .percentiles import Percentiles

_MIN_RUNS, _MAX_RUNS = 5, 1000
WARM_UP = 0.2
"""Seconds in which a model runs before it is measured."""


@dataclass(frozen=True)
class Cost:
    """Time, work, the expected time (expected.py), and the share of the machine's limit.

    The share is the time that the limit allows, divided by the time taken.
    """

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
    """The result of `bench`.

    seconds is the median of whole runs, percentiles are theirs. cpu_seconds is the median CPU time of all threads of
    the process, which a noisy neighbor does not extend. calls are the kernels of one run, in order. The rest of the run
    is the virtual machine, Python, and the memory of results. timeline has the start and duration of each call in one
    run, that of median length. peer is the median of the runs of another runtime, if any, which alternated with those
    of the model.
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
        """Return the cost of all calls of a run, in the time of a whole run."""
        return self._cost(self.calls, self.seconds)

    def by_kind(self) -> dict[str, Cost]:
        """Group the calls by kind: "matmul", "attention" and "other"; the most expensive first."""
        return self._group_calls(lambda call: call.kernel.kind)

    def by_kernel(self) -> dict[str, Cost]:
        """Group the calls by kernel; the most expensive first."""
        return self._group_calls(lambda call: call.kernel.name)

    def cost(self, call: TimedCall) -> Cost:
        return self._cost([call], call.seconds)

    def to_data(self) -> dict[str, Any]:
        """Return everything, with the totals by kind and by kernel, as JSON-compatible data."""
        costs = {"by_kind": self.by_kind(), "by_kernel": self.by_kernel()}
        tables = {name: {key: dataclasses.asdict(cost) for key, cost in table.items()} for name, table in costs.items()}
        return {**dataclasses.asdict(self), **tables}

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=1) + "\n"

    def save_png(self, path: str | Path) -> None:
        """Draw the time of each kernel as a bar, with the time that the limit allows. Needs matplotlib."""
        from .report import draw_picture

        draw_picture(self, Path(path))

    def trace(self) -> str:
        """Return one run as a timeline for ui.perfetto.dev: JSON in the Trace Event Format."""
        from .trace import trace

        return trace(self)

    def __str__(self) -> str:
        from .report import format_profile

        return format_profile(self)

    def __repr__(self) -> str:
        from .report import format_headline

        return f"Profile({format_headline(self)[0]})"

    def _repr_html_(self) -> str:
        from .report import format_html

        return format_html(self)

    def _group_calls(self, key: Callable[[TimedCall], str]) -> dict[str, Cost]:
        groups: dict[str, list[TimedCall]] = {}
        for call in self.calls:
            groups.setdefault(key(call), []).append(call)
        costs = {name: self._cost(calls, sum(c.seconds for c in calls)) for name, calls in groups.items()}
        return dict(sorted(costs.items(), key=lambda item: -item[1].seconds))

    def _cost(self, calls: Iterable[TimedCall], seconds: float) -> Cost:
        calls = list(calls)
        limit_seconds = sum(self.limits.seconds(c.flops, c.bytes) for c in calls)
        flops, size = (sum(getattr(c, name) for c in calls) for name in ("flops", "bytes"))
        expected = sum(expected_seconds(c.kernel, c.flops, c.bytes, self.limits) for c in calls)
        return Cost(len(calls), seconds, flops, size, expected, limit_seconds / seconds)


def bench(
    model: Model | str | os.PathLike[str],
    sizes: Mapping[str, int] | None = None,
    inputs: Mapping[str, Any] | None = None,
    threads: int = 1,
    seconds: float = 2.0,
    against: str | os.PathLike[str] | None = None,
    warm_up: float = WARM_UP,
) -> Profile:
    """Measure a compiled model, or an artifact folder; needs no compiler.

    The measurement takes about `seconds` or more. Half of it are whole runs, half runs in which each kernel is timed;
    they alternate. The machine's limits are measured at the end, with the same number of threads
    (lowering/profiling/limits.py).

    Args:
        model: A model, or an artifact folder.
        sizes: The model's symbolic dimensions by name, and with static_cache the number of tokens in the caches.
        inputs: Arrays by name, in GPU memory for a model on a GPU. The others are synthetic: floating-point numbers are
            normally distributed, integers and bools are 1, so that masks hide nothing.
        threads: With how many threads each run runs.
        seconds: How long to measure.
        against: The ONNX model that a CPU's artifact was compiled from. onnxruntime runs it on the same inputs, with as
            many threads, alternating with the model.
        warm_up: How many seconds to run before, once at least.

    Returns:
        The times of runs and kernels, in seconds.

    Raises:
        InputError: Sizes are missing or not the model's, or onnxruntime cannot take part.
        ArtifactError: `load` rejects the artifact.
    """
    if not isinstance(model, Model):
        model = load(Path(model))
    bound_inputs = dict(inputs or {})
    sizes = resolve_sizes(model.manifest, sizes or {}, bound_inputs)
    arrays = synthetic_inputs(model, sizes, bound_inputs)
    threads = check_integer(threads, "threads", 1, MAX_THREADS)
    peer = None
    if against is not None:
        if model.gpu is not None:
            raise InputError(
                "profile.gpu_unsupported", "onnxruntime is measured on CPUs, and this artifact is for GPUs."
            )
        peer = load_onnxruntime(against, model.manifest, arrays, threads)
    runs = _measure_runs(model, arrays, threads, seconds, warm_up, peer)
    calls, profiler = runs.summarize_calls(), runs.profiler
    percentiles = Percentiles.from_seconds(runs.wall)
    read = sum(c.bytes for c in calls)
    limits = measure_limits(threads, read) if model.gpu is None else measure_gpu_limits(model.gpu)
    cpu_seconds, peer_seconds = float(np.median(runs.cpu)), float(np.median(runs.peer)) if runs.peer else None
    median_run = int(np.argsort([sum(run_times) for run_times in profiler.times])[len(profiler.times) // 2])
    spans = zip(profiler.begins[median_run], profiler.times[median_run])
    timeline = tuple((begin / 1e9, nanoseconds / 1e9) for begin, nanoseconds in spans)
    target, count = model.manifest.target, len(runs.wall)
    return Profile(
        percentiles.p50, percentiles, cpu_seconds, count, threads, target, sizes, limits, calls, timeline, peer_seconds
    )


def time_calls(model: Model, arrays: Mapping[str, Any], threads: int, seconds: float) -> tuple[TimedCall, ...]:
    """Return the kernel calls of a run as `bench` does, without the machine's limits."""
    return _measure_runs(model, arrays, threads, seconds, WARM_UP, None).summarize_calls()


@dataclass(frozen=True)
class _Runs:
    """Seconds of whole runs, of the process and of the peer in them, and the profiler of the runs between them."""

    profiler: Profiler
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)

    def summarize_calls(self) -> tuple[TimedCall, ...]:
        """Return the calls with the median of their times."""
        times = np.median(np.array(self.profiler.times), axis=0) / 1e9
        return tuple(
            TimedCall(c.kernel, c.nodes, c.flops, c.bytes, float(t)) for c, t in zip(self.profiler.calls, times)
        )


def _measure_runs(
    model: Model,
    arrays: Mapping[str, Any],
    threads: int,
    seconds: float,
    warm_up: float,
    peer: Callable[[], object] | None,
) -> _Runs:
    call = model.bind(arrays, threads=threads)
    runs = _Runs(Profiler(model))
    run_warm_up(call, model, warm_up)
    begin = time.perf_counter()
    while len(runs.wall) < _MIN_RUNS or (time.perf_counter() - begin < seconds and len(runs.wall) < _MAX_RUNS):
        start, busy = time.perf_counter(), time.process_time()
        call()
        model.wait()
        runs.wall.append(time.perf_counter() - start)
        runs.cpu.append(time.process_time() - busy)
        with model.instrumented(runs.profiler):
            runs.profiler.start()
            call()
        if peer is not None:
            start = time.perf_counter()
            peer()
            runs.peer.append(time.perf_counter() - start)
    return runs


def run_warm_up(call: Callable[[], object], model: Model, seconds: float) -> None:
    """Call it for that many seconds, once at least, and wait for each call."""
    end = time.perf_counter() + seconds
    while True:
        call()
        model.wait()
        if time.perf_counter() >= end:
            return
