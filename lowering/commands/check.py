"""The command that lists what cannot be lowered: check."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .options import DIM, dim


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    k = add_parser("check", help="list every node that cannot be lowered, before any compile")
    k.add_argument("model", type=Path, help="the .onnx file")
    k.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help=DIM)
    k.add_argument("--json", action="store_true", help="print the report as JSON")
    k.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from ..checking.check import check

    report = check(arguments.model, dict(dim(text) for text in arguments.dim))
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=1))
    else:
        for finding in report.findings:
            print(f"{finding.where}: {finding.what} {finding.remedy}".rstrip())
        for warning in report.warnings:
            print(f"warning: {warning}")
        behind = f", {report.unexamined} behind them could not be examined" if report.unexamined else ""
        print(f"{report.nodes} nodes, {len(report.findings)} cannot be lowered{behind}")
    return 0 if report.ok else 1
