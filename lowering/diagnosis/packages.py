"""Installed packages: their versions, read from metadata, those that do not go together, and what each extra lacks."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib import metadata

from ..machine import runtime_alone
from .report import Report

_OURS = "onnx-lowering-runtime" if runtime_alone() else "onnx-lowering"
# Extras of users; others are for work on the project.
_EXTRAS = ("cuda", "fleet", "quantise", "sign", "tune", "bench")
# Packages and versions that are known to fail together, by prefix: what happens, and what to install.
_KNOWN_BAD = [
    (
        ("apache-tvm", "0.27.0.post1"),
        ("apache-tvm-ffi", "0.1.15."),
        "the process ends with a segmentation fault where TensorIR is serialised, as tuning does",
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
        report.blame(f"{_OURS} is not installed, only found: requirements are unknown.", f"pip install {_OURS}")
        requirements = []
    lacking: dict[str, list[str]] = {}
    for text in requirements:
        name, bounds, marker = _parsed(text)
        of_extra = re.search(r"extra == ['\"]([a-z]+)['\"]", marker)
        found = version_of(name)
        if of_extra is not None:
            names = lacking.setdefault(of_extra[1], []) if of_extra[1] in _EXTRAS else []
            if found is None and _applies(marker):
                names.append(name)
            continue
        report.say("packages", name, found or "missing")
        if found is None:
            report.blame(f"{name} is not installed.", f"pip install '{name}{bounds}'", blocks=True)
        elif not satisfies(found, bounds):
            what = f"{name} {found} is installed, and {_OURS} needs {name}{bounds}."
            report.blame(what, f"pip install '{name}{bounds}'", blocks=True)
    for extra, names in lacking.items():
        lacks = f"lacks {', '.join(names)}: pip install '{_OURS}[{extra}]'"
        report.say("extras", extra, lacks if names else "complete")
    for (first, bad), (second, worse), what, mend in _KNOWN_BAD:
        one, other = version_of(first) or "", version_of(second) or ""
        if one.startswith(bad) and other.startswith(worse):
            report.blame(f"{first} {one} and {second} {other} do not go together: {what}.", mend, blocks=True)
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


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version is inside bounds such as `>=1.1,<2`, by its numbers; == wants the very version."""
    for bound in filter(None, bounds.split(",")):
        sign, wanted = re.fullmatch(r"\s*(==|>=|<)(.*)", bound).groups()  # type: ignore[union-attr]
        have, limit = _numbers(version), _numbers(wanted)
        if not {"==": version == wanted.strip(), ">=": have >= limit, "<": have < limit}[sign]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """1.23.0rc1 as (1, 23, 0)."""
    return tuple(int(n) for n in re.match(r"\s*(\d+(?:\.\d+)*)", version)[1].split("."))  # type: ignore[index]


def _applies(marker: str) -> bool:
    """Whether a requirement is one on a machine like this."""
    found = re.search(r"platform_machine (==|!=) ['\"](\w+)['\"]", marker)
    return found is None or (platform.machine() == found[2]) == (found[1] == "==")


def _parsed(requirement: str) -> tuple[str, str, str]:
    """Name, bounds and marker of a requirement as metadata has it."""
    text, _, marker = requirement.partition(";")
    name = re.match(r"[\w.-]+", text)[0]  # type: ignore[index]
    return name, re.sub(r"^\[.*?\]", "", text[len(name) :].strip()).strip("() "), marker


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
    mend = f"pip install --force-reinstall {_OURS}, in a new virtual environment if that does not help."
    report.blame(f"{_WHAT}: {failed.rstrip('.')}.", mend, blocks=True)
