"""Timing on a shared machine: contenders take turns in one run; medians with spread, CPU time next to wall time."""

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


Seconds = tuple[float, float]
"""The time of one call, by wall clock and by CPU time."""


def timed(call: Callable[[], object], calls: int) -> Seconds:
    """Repeats the call; where there are several, once more before the clock starts, so that it finds the caches as its
    own calls leave them."""
    if calls > 1:
        call()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


def interleaved(contenders: Mapping[str, Callable[[int], Seconds]], turns: int, seconds: float) -> dict[str, Timing]:
    """Times every contender `turns` times, one after the other; each turn repeats its call for about `seconds`.

    A contender is a function that times so many calls, as `timed` does. It is warm: it has been called twice before.
    One whose single call takes many times as long as a turn sits out the later turns, three at least being its own.
    """
    number, own_turns = {}, {}
    for name, contender in contenders.items():
        contender(1)
        once = max(contender(1)[0], 1e-9)
        number[name] = max(1, round(seconds / once))
        own_turns[name] = min(turns, max(3, int(_PATIENCE * seconds * turns / once)))
    samples: dict[str, list[Seconds]] = {name: [] for name in contenders}
    for turn in range(turns):
        for name, contender in contenders.items():
            if turn < own_turns[name]:
                samples[name].append(contender(number[name]))
    return {name: _timing(*zip(*times)) for name, times in samples.items()}


def _timing(wall: tuple[float, ...], cpu: tuple[float, ...]) -> Timing:
    return Timing(statistics.median(wall), min(wall), max(wall), statistics.median(cpu))
