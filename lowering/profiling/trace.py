"""A run as a timeline, in the Trace Event Format that Perfetto (ui.perfetto.dev) and chrome://tracing read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .benchmark import Profile, TimedCall

_PROCESS, _KERNELS = 1, 1


def trace(profile: Profile) -> str:
    """Return the JSON: an event for each kernel of one run, that of median length, with its work and ONNX nodes.

    Kernels follow each other; the trace does not record how their threads share the work.
    """
    title = f"{profile.target}, " + ", ".join(f"{name}={size}" for name, size in profile.sizes.items())
    events: list[dict[str, Any]] = [
        _named("process_name", title.removesuffix(", ")),
        _named("thread_name", f"kernels, on {profile.threads} threads"),
    ]
    events += [_event(profile, *item) for item in zip(profile.calls, profile.timeline, strict=True)]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=1) + "\n"


def _event(profile: Profile, call: TimedCall, span: tuple[float, float]) -> dict[str, Any]:
    begin, seconds = span
    cost = profile.cost(call)
    return {
        "name": call.kernel.name,
        "cat": call.kernel.kind,
        "ph": "X",
        "pid": _PROCESS,
        "tid": _KERNELS,
        "ts": begin * 1e6,
        "dur": seconds * 1e6,
        "args": {
            "ONNX nodes": ", ".join(call.nodes),
            "schedule": call.kernel.schedule,
            "FLOP": call.flops,
            "bytes": call.bytes,
            "median of all runs, us": call.seconds * 1e6,
            "of limit": cost.of_limit,
        },
    }


def _named(kind: str, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": _KERNELS, "args": {"name": name}}
