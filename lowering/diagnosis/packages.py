"""Installed packages: versions from metadata, incompatible ones, and the missing packages of each extra."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

from ..machine import install_command, runtime_alone
from .report import DiagnosisReport

_OWN_PACKAGE = "onnx-lowering-runtime" if runtime_alone() else "onnx-lowering"
# Extras for users; the others are for development.
_EXTRAS = ("cuda", "fleet", "quantize", "sign", "tune", "bench", "completion")
# Incompatible packages and versions, by prefix: the failure, and the fix.
_INCOMPATIBLE = [
    (
        ("apache-tvm", "0.27.0.post1"),
        ("apache-tvm-ffi", "0.1.15."),
        "the process ends with a segmentation fault where TensorIR is serialized, as tuning does",
        "pip install apache-tvm-ffi==0.1.14.post1",
    ),
]
# The tried code, its name, and the meaning of a failure.
_TRIAL, _LOADED, _PROBLEM = (
    (
        "from lowering.runtime.library import load_runtime; load_runtime()",
        "load the runtime",
        "the runtime libraries, which run models, cannot be loaded",
    )
    if runtime_alone()
    else ("import tvm", "import tvm", "the compiler, apache-tvm, cannot be imported")
)
_SECONDS = 60  # the limit of an import


def examine(report: DiagnosisReport) -> None:
    """Check versions against the requirements, and import the compiler in another process."""
    report.add_fact("packages", "python", sys.version.split()[0])
    try:
        requirements = metadata.requires(_OWN_PACKAGE) or []
    except metadata.PackageNotFoundError:
        report.add_problem(
            f"{_OWN_PACKAGE} is importable but not installed: its requirements are unknown.", install_command()
        )
        requirements = []
    lacking: dict[str, list[str]] = {}
    for text in requirements:
        requirement = Requirement(text)
        name, bounds, version = requirement.name, str(requirement.specifier), version_of(requirement.name)
        if requirement.marker is not None and "extra" in str(requirement.marker):
            for extra in _EXTRAS:
                if requirement.marker.evaluate({"extra": extra}):
                    lacking.setdefault(extra, []).extend([name] if version is None else [])
            continue
        report.add_fact("packages", name, version or "missing")
        if version is None:
            report.add_problem(f"{name} is not installed.", f"pip install '{name}{bounds}'", blocks=True)
        elif not requirement.specifier.contains(version, prereleases=True):
            problem = f"{name} {version} is installed, and {_OWN_PACKAGE} needs {name}{bounds}."
            report.add_problem(problem, f"pip install '{name}{bounds}'", blocks=True)
    for extra, names in lacking.items():
        lacks = f"lacks {', '.join(names)}: {install_command(extra)}"
        report.add_fact("extras", extra, lacks if names else "complete")
    for (first, first_bad), (second, second_bad), problem, fix in _INCOMPATIBLE:
        first_version, second_version = version_of(first) or "", version_of(second) or ""
        if first_version.startswith(first_bad) and second_version.startswith(second_bad):
            report.add_problem(
                f"{first} {first_version} and {second} {second_version} do not go together: {problem}.",
                fix,
                blocks=True,
            )
    if version_of("onnx-lowering") and version_of("onnx-lowering-runtime"):
        problem = "onnx-lowering and onnx-lowering-runtime are both installed, and have files of the same names."
        report.add_problem(problem, "pip uninstall both, then install one of them.", blocks=True)
    _try_import(report)


def version_of(package: str) -> str | None:
    """Return the installed version by its metadata, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _try_import(report: DiagnosisReport) -> None:
    """Import in a process of its own, as a broken package may end it, and where no folder hides installed packages."""
    command = [sys.executable, "-c", "import sys; sys.modules['torch'] = None; " + _TRIAL]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, cwd="/")
        lines = process.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with status {process.returncode}"
        if process.returncode == 0:
            report.add_fact("packages", _LOADED, "works")
            return
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {_SECONDS} s"
    report.add_fact("packages", _LOADED, "fails")
    fix = f"{install_command(options='--force-reinstall')}, in a new virtual environment if that does not help."
    report.add_problem(f"{_PROBLEM}: {reason.rstrip('.')}.", fix, blocks=True)
