"""One kernel: is its answer right, and how long does it take compared with another one?

Both run alternately on the same arguments. Their ratio is what counts, because a neighbor on the machine slows both.
The time of a single thread is CPU time, so that other processes do not count. The time of several threads, and of a
GPU, is wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..runtime.devices import Gpu
from ..runtime.gpu import load_device_runtime
from ..runtime.library import load_runtime
from . import answers, arguments
from .isolated import CandidateFailure

_EXPECTED = "expected.bin"

_RUN_SECONDS = 4e-3  # seconds of a run of calls, or one call
_MIN_PAIRS = 3  # pairs of runs
_CLEAR_ERRORS = 3.0  # standard errors
_MIN_COLD_BYTES = (
    1 << 20
)  # weights of this many bytes come from memory, as in a model, and not from the caches of the last call
_MAX_COPIES = 8


@dataclass(frozen=True)
class Job:
    """Libraries with a function `main`, and the folder of its arguments and expected answers.

    threads is the number of workers, pairs the maximum number of runs of each, cache the bytes of the machine's largest
    cache, gpu whether the libraries are for the first GPU.
    """

    library: str
    baseline: str
    folder: str
    threads: int
    pairs: int
    cache: int
    gpu: bool = False


@dataclass(frozen=True)
class Measurement:
    """Median seconds of the baseline, the ratio of the kernel's time to it, pair by pair, and the answers' error."""

    baseline: float
    ratios: tuple[float, ...]
    error: float

    @property
    def ratio(self) -> float:
        return float(np.median(self.ratios))

    @property
    def spread(self) -> float:
        """The standard error of the ratio's median, assuming normal errors."""
        deviation = np.median(np.abs(np.array(self.ratios) - self.ratio))
        return float(1.4826 * deviation * 1.2533 / len(self.ratios) ** 0.5)


def expect(library: str, folder: str, threads: int) -> None:
    """Store the answers of a library as the expected ones."""
    index = arguments.read_arguments(Path(folder))
    memory = arguments.load_contents(Path(folder), index)
    load_runtime()
    call = _load_function(library, threads)
    call(*arguments.bind_arguments(index, memory))
    written = [arguments.tensor_bytes(t, memory).tobytes() for t in index.tensors if t.written]
    (Path(folder) / _EXPECTED).write_bytes(b"".join(written))


def measure_job(job: Job) -> Measurement:
    """Check a kernel's answers, then measure it. Raises CandidateFailure."""
    folder = Path(job.folder)
    index = arguments.read_arguments(folder)
    load_runtime()
    gpu = None
    if job.gpu:
        load_device_runtime()
        gpu = Gpu(0)
    kernel = _load_function(job.library, job.threads)
    error = _check_answers(kernel, folder, index, gpu)
    baseline = _load_function(job.baseline, job.threads)
    calls = _argument_lists(folder, index, gpu, job.cache)
    return _run_alternately(kernel, baseline, calls, gpu, job.threads, job.pairs, error)


def _load_function(library: str, threads: int) -> Callable[..., Any]:
    module = tvm_ffi.load_module(library)
    module.get_function("lowering_set_threads")(threads)
    function = module.get_function("main")
    _LOADED.append(module)
    return function


_LOADED: list[tvm_ffi.Module] = []  # functions do not keep their libraries alive


def _check_answers(kernel: Callable[..., Any], folder: Path, index: arguments.Arguments, gpu: Gpu | None) -> float:
    """Return the largest error of the answers.

    Raises CandidateFailure("wrong") for wrong answers, and for changes of other memory.
    """
    memory = arguments.load_contents(folder, index)
    before = memory.copy()
    bound = arguments.bind_arguments(index, memory, gpu)
    kernel(*bound)
    if gpu is not None:
        arguments.copy_back(index, bound, memory, gpu)
    expected = np.fromfile(folder / _EXPECTED, np.uint8)
    error, offset = 0.0, 0
    for number, tensor in enumerate(index.tensors):
        answer = arguments.tensor_bytes(tensor, memory)
        name = f"argument {number}"
        if tensor.written:
            error = max(error, answers.check(name, tensor.dtype, answer, expected[offset : offset + tensor.nbytes]))
            offset += tensor.nbytes
        elif not np.array_equal(answer, arguments.tensor_bytes(tensor, before)):
            raise CandidateFailure("wrong", f"{name} was written, which is only read")
    return error


def _argument_lists(folder: Path, index: arguments.Arguments, gpu: Gpu | None, cache: int) -> list[list[Any]]:
    """Return argument lists to rotate through, so that weights are cached no more than when a model runs."""
    weights = sum(t.nbytes for t in index.tensors if t.constant)
    copies = min(_MAX_COPIES, 1 + cache // weights) if weights >= _MIN_COLD_BYTES else 1
    memories = [arguments.load_contents(folder, index) for _ in range(copies)]
    first = arguments.bind_arguments(index, memories[0], gpu)
    return [first] + [
        [
            arguments.bind_tensor(a, memory, gpu) if isinstance(a, arguments.TensorArgument) and a.constant else shared
            for a, shared in zip(index.arguments, first)
        ]
        for memory in memories[1:]
    ]


def _run_alternately(
    kernel: Callable[..., Any],
    baseline: Callable[..., Any],
    argument_lists: Sequence[list[Any]],
    gpu: Gpu | None,
    threads: int,
    pairs: int,
    error: float,
) -> Measurement:
    """Run kernel and baseline in pairs, until it is clear which is faster, or the maximum is reached."""
    lists = cycle(argument_lists)
    clock = time.thread_time if threads == 1 and gpu is None else time.perf_counter

    def time_run(call: Callable[..., Any], count: int) -> float:
        begin = clock()
        for _ in range(count):
            call(*next(lists))
        if gpu is not None:
            gpu.wait()
        return (clock() - begin) / count

    for _ in argument_lists:  # touch the arguments and warm up
        call_seconds = min(time_run(baseline, 1), time_run(kernel, 1))
    count = max(1, round(_RUN_SECONDS / max(call_seconds, 1e-7)))
    times: list[tuple[float, float]] = []
    measured = Measurement(0.0, (), error)
    while len(times) < pairs:
        order = (baseline, kernel) if len(times) % 2 else (kernel, baseline)
        first_seconds, second_seconds = (time_run(call, count) for call in order)
        times.append((first_seconds, second_seconds) if order[0] is baseline else (second_seconds, first_seconds))
        ratios = tuple(kernel_seconds / baseline_seconds for baseline_seconds, kernel_seconds in times)
        measured = Measurement(float(np.median([baseline_seconds for baseline_seconds, _ in times])), ratios, error)
        if len(times) >= _MIN_PAIRS and abs(measured.ratio - 1) > max(_CLEAR_ERRORS * measured.spread, 0.1):
            break
    return measured
