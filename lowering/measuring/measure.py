"""One kernel: is its answer right, and how long does it take beside another one?

Both run in turns on the same arguments, and their ratio is what counts: a neighbor on the machine slows both. The
time of one thread is that for which it had a CPU, so that what others run is not counted; that of several, and of a
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
from .isolated import Failed

_EXPECTED = "expected.bin"

_TURN = 4e-3  # seconds of a turn, or one call
_FEWEST = 3  # pairs of turns
_CLEAR = 3.0  # standard errors
_COLD = 1 << 20  # weights of so many bytes come from memory, as in a model, and not from the last call's caches
_COPIES = 8


@dataclass(frozen=True)
class Job:
    """Libraries with a function `main`, and the folder of its arguments and expected answers.

    threads is the number of workers, pairs the most turns of each, cache the bytes of the machine's largest cache, gpu
    whether the libraries are for the first GPU.
    """

    library: str
    baseline: str
    folder: str
    threads: int
    pairs: int
    cache: int
    gpu: bool = False


@dataclass(frozen=True)
class Measured:
    """Median seconds of the baseline, and by how much the kernel's time is that, pair by pair; and its error."""

    baseline: float
    ratios: tuple[float, ...]
    error: float

    @property
    def ratio(self) -> float:
        return float(np.median(self.ratios))

    @property
    def spread(self) -> float:
        """The standard error of the ratio's median, if its errors were normal."""
        away = np.median(np.abs(np.array(self.ratios) - self.ratio))
        return float(1.4826 * away * 1.2533 / len(self.ratios) ** 0.5)


def expect(library: str, folder: str, threads: int) -> None:
    """Keeps what a library answers as what is expected."""
    listed = arguments.read(Path(folder))
    memory = arguments.memory_of(Path(folder), listed)
    load_runtime()
    call = _function(library, threads)
    call(*arguments.placed(listed, memory))
    written = [arguments.contents(t, memory).tobytes() for t in listed.tensors if t.written]
    (Path(folder) / _EXPECTED).write_bytes(b"".join(written))


def measure(job: Job) -> Measured:
    """Checks first. Raises Failed."""
    folder = Path(job.folder)
    listed = arguments.read(folder)
    load_runtime()
    gpu = None
    if job.gpu:
        load_device_runtime()
        gpu = Gpu(0)
    kernel = _function(job.library, job.threads)
    error = _checked(kernel, folder, listed, gpu)
    baseline = _function(job.baseline, job.threads)
    calls = _argument_lists(folder, listed, gpu, job.cache)
    return _in_turns(kernel, baseline, calls, gpu, job.threads, job.pairs, error)


def _function(library: str, threads: int) -> Callable[..., Any]:
    module = tvm_ffi.load_module(library)
    module.get_function("lowering_set_threads")(threads)
    function = module.get_function("main")
    _LOADED.append(module)
    return function


_LOADED: list[tvm_ffi.Module] = []  # functions do not keep their libraries


def _checked(kernel: Callable[..., Any], folder: Path, listed: arguments.Arguments, gpu: Gpu | None) -> float:
    """The largest error of the answers. Raises Failed("wrong") for answers, or for other memory that was changed."""
    memory = arguments.memory_of(folder, listed)
    before = memory.copy()
    placed = arguments.placed(listed, memory, gpu)
    kernel(*placed)
    if gpu is not None:
        arguments.take_back(listed, placed, memory, gpu)
    expected = np.fromfile(folder / _EXPECTED, np.uint8)
    error, at = 0.0, 0
    for number, tensor in enumerate(listed.tensors):
        got = arguments.contents(tensor, memory)
        name = f"argument {number}"
        if tensor.written:
            error = max(error, answers.check(name, tensor.dtype, got, expected[at : at + tensor.nbytes]))
            at += tensor.nbytes
        elif not np.array_equal(got, arguments.contents(tensor, before)):
            raise Failed("wrong", f"{name} was written, which is only read")
    return error


def _argument_lists(folder: Path, listed: arguments.Arguments, gpu: Gpu | None, cache: int) -> list[list[Any]]:
    """Arguments to take turns with, so that weights are no more in caches than they are when a model runs."""
    weights = sum(t.nbytes for t in listed.tensors if t.constant)
    copies = min(_COPIES, 1 + cache // weights) if weights >= _COLD else 1
    memories = [arguments.memory_of(folder, listed) for _ in range(copies)]
    first = arguments.placed(listed, memories[0], gpu)
    return [first] + [
        [
            arguments.place(a, memory, gpu) if isinstance(a, arguments.TensorArgument) and a.constant else shared
            for a, shared in zip(listed.arguments, first)
        ]
        for memory in memories[1:]
    ]


def _in_turns(
    kernel: Callable[..., Any],
    baseline: Callable[..., Any],
    argument_lists: Sequence[list[Any]],
    gpu: Gpu | None,
    threads: int,
    pairs: int,
    error: float,
) -> Measured:
    """Pairs of turns, until it is clear which is faster, or there are so many."""
    lists = cycle(argument_lists)
    clock = time.thread_time if threads == 1 and gpu is None else time.perf_counter

    def turn(call: Callable[..., Any], count: int) -> float:
        begin = clock()
        for _ in range(count):
            call(*next(lists))
        if gpu is not None:
            gpu.wait()
        return (clock() - begin) / count

    for _ in argument_lists:  # touched and warm
        once = min(turn(baseline, 1), turn(kernel, 1))
    count = max(1, round(_TURN / max(once, 1e-7)))
    times: list[tuple[float, float]] = []
    found = Measured(0.0, (), error)
    while len(times) < pairs:
        order = (baseline, kernel) if len(times) % 2 else (kernel, baseline)
        one, other = (turn(call, count) for call in order)
        times.append((one, other) if order[0] is baseline else (other, one))
        ratios = tuple(mine / its for its, mine in times)
        found = Measured(float(np.median([its for its, _ in times])), ratios, error)
        if len(times) >= _FEWEST and abs(found.ratio - 1) > max(_CLEAR * found.spread, 0.1):
            break
    return found
