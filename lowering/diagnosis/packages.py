"""Installed packages: their versions, read from metadata, those that do not go together, and what each extra lacks."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

from ..machine import install_command, runtime_alone
from .report import Report

_OURS = "onnx-lowering-runtime" if runtime_alone() else "onnx-lowering"
# Extras of users; others are for work on the project.
_EXTRAS = ("cuda", "fleet", "quantize", "sign", "tune", "bench", "completion")
# Packages and versions that are known to fail together, by prefix: what happens, and what to install.
_KNOWN_BAD = [
    (
        ("apache-tvm", "0.27.0.post1"),
        ("apache-tvm-ffi", "0.1.15."),
        "the process ends with a segmentation fault where TensorIR is serialized, as tuning does",
        "pip install apache-tvm-ffi==0.1.14.post1",
    ),
]
# What is tried, what it is called, and what it means that it fails.
_TRIAL, _LOADED, _WHAT = (
    (
        "from lowering.runtime.library import load_runtime; load_runtime()",
        "load the runtime",
        "the runtime libraries, which run models, cannot be loaded",
    )
    if runtime_alone()
    else ("import tvm", "import tvm", "the compiler, apache-tvm, cannot be imported")
)
_SECONDS = 60  # for an import


def examine(report: Report) -> None:
    """Versions against our own requirements, and whether the compiler can be imported, tried in another process."""
    report.say("packages", "python", sys.version.split()[0])
    try:
        requirements = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:
        report.blame(f"{_OURS} is not installed, only found: requirements are unknown.", install_command())
        requirements = []
    lacking: dict[str, list[str]] = {}
    for text in requirements:
        wanted = Requirement(text)
        name, bounds, found = wanted.name, str(wanted.specifier), version_of(wanted.name)
        if wanted.marker is not None and "extra" in str(wanted.marker):
            for extra in _EXTRAS:
                if wanted.marker.evaluate({"extra": extra}):
                    lacking.setdefault(extra, []).extend([name] if found is None else [])
            continue
        report.say("packages", name, found or "missing")
        if found is None:
            report.blame(f"{name} is not installed.", f"pip install '{name}{bounds}'", blocks=True)
        elif not wanted.specifier.contains(found, prereleases=True):
            what = f"{name} {found} is installed, and {_OURS} needs {name}{bounds}."
            report.blame(what, f"pip install '{name}{bounds}'", blocks=True)
    for extra, names in lacking.items():
        lacks = f"lacks {', '.join(names)}: {install_command(extra)}"
        report.say("extras", extra, lacks if names else "complete")
    for (first, bad), (second, worse), what, fix in _KNOWN_BAD:
        one, other = version_of(first) or "", version_of(second) or ""
        if one.startswith(bad) and other.startswith(worse):
            report.blame(f"{first} {one} and {second} {other} do not go together: {what}.", fix, blocks=True)
    if version_of("onnx-lowering") and version_of("onnx-lowering-runtime"):
        what = "onnx-lowering and onnx-lowering-runtime are both installed, and have files of the same names."
        report.blame(what, "pip uninstall both, then install one of them.", blocks=True)
    _try_import(report)


def version_of(package: str) -> str | None:
    """What is installed, by its metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _try_import(report: Report) -> None:
    """In a process of its own, as what is broken may end it, and where no folder hides what is installed."""
    command = [sys.executable, "-c", "import sys; sys.modules['torch'] = None; " + _TRIAL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, cwd="/")
        said = done.stderr.strip().splitlines()
        failed = said[-1] if said else f"the process ended with status {done.returncode}"
        if done.returncode == 0:
            report.say("packages", _LOADED, "works")
            return
    except subprocess.TimeoutExpired:
        failed = f"it did not end within {_SECONDS} s"
    report.say("packages", _LOADED, "fails")
    fix = f"{install_command(options='--force-reinstall')}, in a new virtual environment if that does not help."
    report.blame(f"{_WHAT}: {failed.rstrip('.')}.", fix, blocks=True)
