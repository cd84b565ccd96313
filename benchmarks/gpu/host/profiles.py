"""Profiles of the GPU: the launches that PyTorch's profiler saw, and what of their time each kernel has."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One kernel of a profile; seconds on the GPU's clock."""

    kernel: str
    start: float
    end: float


def kernels_of(events: Any, device: str) -> list[Launch]:
    """The events of PyTorch's profiler that ran on a kind of device, in the order in which they began."""
    there = [event for event in events if device in str(event.device_type)]
    return sorted(
        (Launch(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in there),
        key=lambda launch: launch.start,
    )


def summarize(launches: Sequence[Launch], steps: int) -> dict[str, Any]:
    """Summarize the launches of so many steps: seconds and launches of a step by kernel, longest first.

    span is from the first beginning to the last end, busy the sum. Raises ValueError where nothing was seen.
    """
    if not launches:
        raise ValueError("the profiler saw no kernel")
    times: dict[str, list[float]] = {}
    for launch in launches:
        times.setdefault(launch.kernel, []).append(launch.end - launch.start)
    kernels = {
        name: {"seconds": sum(values) / steps, "launches": len(values) / steps, "median": statistics.median(values)}
        for name, values in sorted(times.items(), key=lambda item: -sum(item[1]))
    }
    span = max(launch.end for launch in launches) - min(launch.start for launch in launches)
    return {"kernels": kernels, "span": span / steps, "busy": sum(map(sum, times.values())) / steps}
