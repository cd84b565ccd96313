"""The command about this machine: doctor."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from ..deprecated import with_old_fields
from .json_output import add_json, print_json


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    d = add_parser(
        "doctor",
        help="look at packages, CPU, linkers, GPUs and folders; each problem with its fix",
        description="Shows what this machine has for compiling and running models: packages and versions that do not "
        "go together, CPU, threads, folders, linkers, driver and GPUs. Ends with 1 where something is missing that "
        "is needed.",
        example="doctor",
    )
    add_json(d)
    d.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    """Return 1 if anything needed is missing: to compile for this machine, or to run where the runtime is alone."""
    from ..diagnosis import here, packages, toolchain
    from ..diagnosis.report import DiagnosisReport

    report = DiagnosisReport()
    for area in (packages, here, toolchain):
        area.examine(report)
    if arguments.json:
        print_json(with_old_fields({"ok": report.ok, **dataclasses.asdict(report)}))
    else:
        print(report)
    return 0 if report.ok else 1
