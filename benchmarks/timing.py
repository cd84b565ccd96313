"""Timing on a shared machine: contenders take turns in one run; medians with spread, CPU time beside wall time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# How many times the length of its turns a contender may take in all.
_PATIENCE = 10


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the turns: median, smallest and largest by wall clock, median by CPU time.

    CPU time well above wall time means several threads; well below means that somebody else had the core.
    """

    median: float
    low: float
    high: float
    cpu: float


def interleaved(contenders: Mapping[str, Callable[[], object]], turns: int, seconds: float) -> dict[str, Timing]:
    """Times every contender `turns` times, one after the other; each turn repeats its call for about `seconds`.

    Every contender is warm: it has been called twice before, and where a turn has several calls once more before its
    clock starts, so that it finds the caches as its own calls leave them. One whose single call takes many times as
    long as a turn sits out the later turns, three at least being its own.
    """
    number, own_turns = {}, {}
    for name, call in contenders.items():
        call()
        start = time.perf_counter()
        call()
        once = max(time.perf_counter() - start, 1e-9)
        number[name] = max(1, round(seconds / once))
        own_turns[name] = min(turns, max(3, int(_PATIENCE * seconds * turns / once)))
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name, call in contenders.items():
            if turn >= own_turns[name]:
                continue
            if number[name] > 1:
                call()
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            for _ in range(number[name]):
                call()
            wall[name].append((time.perf_counter() - wall_start) / number[name])
            cpu[name].append((time.process_time() - cpu_start) / number[name])
    return {
        name: Timing(statistics.median(times), min(times), max(times), statistics.median(cpu[name]))
        for name, times in wall.items()
    }
