"""The command about this machine: doctor."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    d = add_parser("doctor", help="look at packages, CPU, linkers, GPUs and folders; each problem with its mend")
    d.add_argument("--json", action="store_true", help="print the report as JSON")
    d.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    """1 where something is missing that compiling for this machine needs, or running where the runtime is alone."""
    from ..diagnosis import here, packages, toolchain
    from ..diagnosis.report import Report

    report = Report()
    for area in (packages, here, toolchain):
        area.examine(report)
    print(json.dumps({"ok": report.ok, **dataclasses.asdict(report)}, indent=1) if arguments.json else report)
    return 0 if report.ok else 1
