"""This machine: its CPU, the limits of this process, and the folders that compilation writes to."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from pathlib import Path

from ..cache_folder import cache_folder, find_distrust_reason
from ..machine import V3, V4, cpu_flags, host_features
from .report import DiagnosisReport

_GIB = 2**30
_MIN_FREE = 2**29  # bytes in a folder that compilation writes to


def examine(report: DiagnosisReport, cgroups: Path = Path("/sys/fs/cgroup")) -> None:
    machine = platform.machine()
    report.add_fact("machine", "system", f"{platform.system()} {platform.release()}, {machine}")
    if machine == "x86_64":
        features = host_features()
        level = "x86-64-v4" if set(V4) <= set(features) else "x86-64-v3" if set(V3) <= set(features) else "x86-64"
        report.add_fact("machine", "cpu", f"{level}: {', '.join(features)}")
    elif machine == "aarch64":
        report.add_fact("machine", "cpu", f"aarch64: {', '.join(sorted(cpu_flags()))}")
    else:
        problem = f"this machine is {machine}; target 'cpu' is for x86_64 and aarch64."
        report.add_problem(problem, "Name a target of another machine, such as --target cpu:x86-64-v3.", blocks=True)
    _examine_threads(report, cgroups)
    for name, folder in (("temporary files", Path(tempfile.gettempdir())), ("cache", cache_folder())):
        _examine_folder(report, name, folder)


def _examine_threads(report: DiagnosisReport, cgroups: Path) -> None:
    """Report the CPUs of the process, and the CPU time and memory of its control group."""
    usable = len(os.sched_getaffinity(0))
    report.add_fact("machine", "threads", f"{usable} of {os.cpu_count()} CPUs may be used")
    limits = _read_limits(cgroups)
    quota = limits.get("cpu.max", "max").split()
    if quota[0] != "max":
        cpus = int(quota[0]) / int(quota[1])
        report.add_fact("machine", "cgroup", f"the time of {cpus:.3g} CPUs")
        if cpus < usable:
            report.add_problem(
                f"the control group gives the time of {cpus:.3g} CPUs, and a call takes {usable} threads: they wait.",
                f"Use threads={max(1, int(cpus))}: compile --threads, run --threads or load(threads=).",
            )
    memory = limits.get("memory.max", "max").strip()
    if memory != "max":
        report.add_fact("machine", "memory limit", f"{int(memory) / _GIB:.1f} GiB by the control group")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    report.add_fact("machine", "memory", f"{total / _GIB:.1f} GiB")


def _read_limits(cgroups: Path) -> dict[str, str]:
    """Return cpu.max and memory.max of the process's control group (version 2), from the nearest group with each."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own_group = next((line.split("::", 1)[1] for line in lines if line.startswith("0::")), "/")
    group = cgroups / own_group.lstrip("/")
    limits: dict[str, str] = {}
    for folder in (group, *group.parents):
        for name in ("cpu.max", "memory.max"):
            path = folder / name
            if not path.is_file() or limits.get(name, "max").split()[0] != "max":
                continue
            limits[name] = path.read_text()
        if folder == cgroups:
            break
    return limits


def _examine_folder(report: DiagnosisReport, name: str, folder: Path) -> None:
    """Report size, free space and permissions of a folder, which need not exist."""
    existing = next(ancestor for ancestor in (folder, *folder.absolute().parents) if ancestor.exists())
    free = shutil.disk_usage(existing).free
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if name == "cache" else 0
    usage = f", holds {size / 2**20:.1f} MiB" if size else ""
    report.add_fact("folders", name, f"{folder}: {free / _GIB:.1f} GiB free{usage}")
    variable = "TMPDIR" if name != "cache" else "ONNX_LOWERING_CACHE"
    blocks = name != "cache"
    if not os.access(existing, os.W_OK | os.X_OK):
        report.add_problem(
            f"'{existing}', for {name}, cannot be written.", f"Set {variable} to a folder that can be written.", blocks
        )
    elif name == "cache" and (why := find_distrust_reason(folder)) is not None:
        remedy = "Make it yours alone (chmod go-w), or set ONNX_LOWERING_CACHE to a folder that is."
        report.add_problem(f"{why}: the cache is not used, as code from there would run as you.", remedy)
    elif free < _MIN_FREE:
        problem = f"'{existing}', for {name}, has {free / 2**20:.0f} MiB left."
        report.add_problem(problem, f"Remove something, or set {variable} to another folder.")
