"""This machine: its CPU, what of it this process may use, and where compiling writes."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from pathlib import Path

from ..cache_folder import cache_folder, distrusted
from ..machine import V3, V4, cpu_flags, host_features
from .report import Report

_GIB = 2**30
_LEAST_FREE = 2**29  # bytes of a folder that compiling writes into


def examine(report: Report, cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    machine = platform.machine()
    report.say("machine", "system", f"{platform.system()} {platform.release()}, {machine}")
    if machine == "x86_64":
        features = host_features()
        level = "x86-64-v4" if set(V4) <= set(features) else "x86-64-v3" if set(V3) <= set(features) else "x86-64"
        report.say("machine", "cpu", f"{level}: {', '.join(features)}")
    elif machine == "aarch64":
        report.say("machine", "cpu", f"aarch64: {', '.join(sorted(cpu_flags()))}")
    else:
        what = f"this machine is {machine}; target 'cpu' is for x86_64 and aarch64."
        report.blame(what, "Name a target of another machine, such as --target cpu:x86-64-v3.", blocks=True)
    _threads(report, cgroups)
    for name, folder in (("temporary files", Path(tempfile.gettempdir())), ("cache", cache_folder())):
        _folder(report, name, folder)


def _threads(report: Report, cgroups: Path) -> None:
    """CPUs that the process may run on, and the time that its control group gives it."""
    usable = len(os.sched_getaffinity(0))
    report.say("machine", "threads", f"{usable} of {os.cpu_count()} CPUs may be used")
    limits = _limits(cgroups)
    quota = limits.get("cpu.max", "max").split()
    if quota[0] != "max":
        cpus = int(quota[0]) / int(quota[1])
        report.say("machine", "cgroup", f"the time of {cpus:.3g} CPUs")
        if cpus < usable:
            report.blame(
                f"the control group gives the time of {cpus:.3g} CPUs, and a call takes {usable} threads: they wait.",
                f"Use threads={max(1, int(cpus))}: compile --threads, run --threads or load(threads=).",
            )
    memory = limits.get("memory.max", "max").strip()
    if memory != "max":
        report.say("machine", "memory limit", f"{int(memory) / _GIB:.1f} GiB by the control group")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report.say("machine", "memory", f"{total / _GIB:.1f} GiB")


def _limits(cgroups: Path) -> dict[str, str]:
    """cpu.max and memory.max of the process's control group (version 2), from the nearest that has each."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "/")
    group = cgroups / own.lstrip("/")
    found: dict[str, str] = {}
    for folder in (group, *group.parents):
        for name in ("cpu.max", "memory.max"):
            path = folder / name
            if not path.is_file() or found.get(name, "max").split()[0] != "max":
                continue
            found[name] = path.read_text()
        if folder == cgroups:
            break
    return found


def _folder(report: Report, name: str, folder: Path) -> None:
    """Size, free space and rights of a folder, which need not be there yet."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if name == "cache" else 0
    held = f", holds {size / 2**20:.1f} MiB" if size else ""
    report.say("folders", name, f"{folder}: {free / _GIB:.1f} GiB free{held}")
    variable = "TMPDIR" if name != "cache" else "ONNX_LOWERING_CACHE"
    blocks = name != "cache"
    if not os.access(there, os.W_OK | os.X_OK):
        report.blame(f"'{there}', for {name}, cannot be written.", f"Set {variable} to a folder that can.", blocks)
    elif name == "cache" and (why := distrusted(folder)) is not None:
        remedy = "Make it yours alone (chmod go-w), or set ONNX_LOWERING_CACHE to a folder that is."
        report.blame(f"{why}: the cache is not used, as code from there would run as you.", remedy)
    elif free < _LEAST_FREE:
        what = f"'{there}', for {name}, has {free / 2**20:.0f} MiB left."
        report.blame(what, f"Remove something, or set {variable} to another folder.")
