"""Timing on a GPU: CUDA events around whole rotations through the input sets, contenders taking turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

TURNS, SECONDS = 15, 0.01


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the turns: median, smallest, largest. graph says that a CUDA graph made the calls, so that
    kernels follow each other without the host; without one the host's part counts where it is the longer."""

    median: float
    low: float
    high: float
    graph: bool


def rotation(calls: Sequence[Call]) -> tuple[Call, bool]:
    """All calls one after the other, each on an input set of its own, as one CUDA graph if they can be captured."""
    import tvm_ffi

    def plain() -> None:
        for call in calls:
            call()

    for _ in range(2):
        plain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with tvm_ffi.use_torch_stream(torch.cuda.graph(graph)):
            plain()
    except RuntimeError:
        torch.cuda.synchronize()
        return plain, False
    return graph.replay, True


def interleaved(contenders: Mapping[str, Sequence[Call]]) -> dict[str, Timing]:
    """Every contender in every turn; a turn repeats its rotation for about SECONDS."""
    rotations = {name: rotation(calls) for name, calls in contenders.items()}
    repeats = {name: max(1, math.ceil(SECONDS / seconds(run, 1))) for name, (run, _) in rotations.items()}
    times: dict[str, list[float]] = {name: [] for name in rotations}
    for _ in range(TURNS):
        for name, (run, _) in rotations.items():
            times[name].append(seconds(run, repeats[name]) / len(contenders[name]))
    return {
        name: Timing(statistics.median(found), min(found), max(found), rotations[name][1])
        for name, found in times.items()
    }


def seconds(run: Call, repeat: int) -> float:
    """By the GPU's clock, per run, after one that is not timed."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(repeat):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeat
