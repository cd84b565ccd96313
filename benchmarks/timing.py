"""Timing on a shared machine: contenders take turns in one run; medians with spread, CPU time beside wall time."""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True)
class Timing:
    """Seconds per call over the repeats: median, smallest and largest by wall clock, median by CPU time.

    CPU time well above wall time means several threads; well below means that somebody else had the core.
    """

    median: float
    low: float
    high: float
    cpu: float


def facts(threads: int) -> dict[str, object]:
    """What a results file says about the run: day, machine with the vector features that count, versions."""
    path = Path("/proc/cpuinfo")
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", path.read_text() if path.exists() else "", re.MULTILINE))
    features = [f for f in ("avx2", "avx512f") if f in fields.get("flags", "").split()]
    return {
        "date": date.today().isoformat(),
        "machine": f"{fields.get('model name', platform.processor())} ({', '.join(features)})",
        "threads": threads,
        "packages": {name: version(name) for name in ("torch", "onnxruntime", "apache-tvm")},
    }


def interleaved(
    contenders: dict[str, Callable[[], object]], repeats: int = 7, seconds: float = 0.2
) -> dict[str, Timing]:
    """Times every contender `repeats` times, in turns; each turn repeats its call for about `seconds`."""
    number = {}
    for name, call in contenders.items():
        call()
        start = time.perf_counter()
        call()
        number[name] = max(1, round(seconds / max(time.perf_counter() - start, 1e-9)))
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, call in contenders.items():
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            for _ in range(number[name]):
                call()
            wall[name].append((time.perf_counter() - wall_start) / number[name])
            cpu[name].append((time.process_time() - cpu_start) / number[name])
    return {
        name: Timing(statistics.median(times), min(times), max(times), statistics.median(cpu[name]))
        for name, times in wall.items()
    }
