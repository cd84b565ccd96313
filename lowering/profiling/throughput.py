"""`bench --callers`: how many requests per second a model answers, with several threads that call it at once."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import units
from ..manifest import MAX_THREADS
from ..runtime import Model, load
from ..runtime.artifact.checks import check_integer
from .benchmark import WARM_UP, run_warm_up
from .inputs import resolve_sizes, synthetic_inputs
from .percentiles import Percentiles


@dataclass(frozen=True)
class Throughput:
    """The result of `throughput`.

    seconds is from the first request to the last answer, requests the number of requests in it, and latency the time of
    one while the others ran. threads are those of each caller.
    """

    requests_per_second: float
    requests: int
    seconds: float
    callers: int
    threads: int
    target: str
    sizes: dict[str, int]
    latency: Percentiles

    def to_data(self) -> dict[str, Any]:
        """Return everything as JSON-compatible data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        latency = ", ".join(
            f"{name} {units.format_time(value)}" for name, value in dataclasses.asdict(self.latency).items()
        )
        return (
            f"{self.requests_per_second:.1f} requests per second, callers: {self.callers}, threads of each: "
            f"{self.threads}" + (f"; {sizes}" if sizes else "") + "\n"
            f"latency: {latency}; {self.requests} requests in {units.format_time(self.seconds)}"
        )


def throughput(
    model: Model | str | os.PathLike[str],
    sizes: Mapping[str, int] | None = None,
    inputs: Mapping[str, Any] | None = None,
    callers: int = 1,
    threads: int = 1,
    seconds: float = 2.0,
    warm_up: float = WARM_UP,
) -> Throughput:
    """Measure how many requests per second a compiled model answers.

    Each of `callers` threads has inputs of its own and calls the model again as soon as it has the answer, for
    `seconds`, once at least; all of them warm up together for `warm_up` seconds before.

    Args:
        model: A model, or an artifact folder; needs no compiler.
        sizes: The model's symbolic dimensions by name, as for `bench`.
        inputs: Arrays by name, which each caller copies; the others are synthetic, as those of `bench`.
        callers: How many threads call at once.
        threads: With how many threads each call runs.
        seconds: How long to measure.
        warm_up: How long to call before that.

    Returns:
        The requests per second, and the latency of requests in seconds.

    Raises:
        InputError: Sizes are missing or not the model's, or a number is not one of callers or threads.
        ArtifactError: `load` rejects the artifact.
    """
    if not isinstance(model, Model):
        model = load(Path(model))
    arrays = dict(inputs or {})
    sizes = resolve_sizes(model.manifest, sizes or {}, arrays)
    callers = check_integer(callers, "callers", 1, MAX_THREADS)
    threads = check_integer(threads, "threads", 1, MAX_THREADS)
    calls = []
    for _ in range(callers):
        copies = {name: array.copy() if hasattr(array, "copy") else array for name, array in arrays.items()}
        calls.append(model.bind(synthetic_inputs(model, sizes, copies), threads=threads))
    runs, duration = _Callers(model, calls, warm_up, seconds).run()
    latency = Percentiles.from_seconds(runs)
    target = model.manifest.target
    return Throughput(len(runs) / duration, len(runs), duration, callers, threads, target, sizes, latency)


class _Callers:
    """Threads that call concurrently, each its own function."""

    def __init__(self, model: Model, calls: Sequence[Callable[[], object]], warm_up: float, seconds: float) -> None:
        self._model, self._calls, self._warm_up, self._seconds = model, calls, warm_up, seconds
        self._start = threading.Barrier(len(calls))
        self._spans: list[list[tuple[float, float]]] = [[] for _ in calls]
        self._errors: list[BaseException] = []

    def run(self) -> tuple[list[float], float]:
        """Run all calls; return the seconds of each request, and those from the first request to the last answer.

        Raises the error of any call.
        """
        threads = [
            threading.Thread(target=self._call, args=(call, spans), daemon=True)
            for call, spans in zip(self._calls, self._spans)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]
        requests = [span for spans in self._spans for span in spans]
        begin, end = min(begin for begin, _ in requests), max(end for _, end in requests)
        return [end - begin for begin, end in requests], end - begin

    def _call(self, call: Callable[[], object], spans: list[tuple[float, float]]) -> None:
        try:
            run_warm_up(call, self._model, self._warm_up)
            self._start.wait()
            until = time.perf_counter() + self._seconds
            while not spans or time.perf_counter() < until:
                begin = time.perf_counter()
                call()
                self._model.wait()
                spans.append((begin, time.perf_counter()))
        except threading.BrokenBarrierError:
            pass  # another caller failed
        except BaseException as error:  # the thread that measures raises it
            self._errors.append(error)
            self._start.abort()
