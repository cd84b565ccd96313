"""The command that lists unsupported nodes: check."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .json_output import add_json, print_json
from .options import DIM, parse_dims


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    k = add_parser(
        "check",
        help="list every node that cannot be lowered, without compiling",
        description="Walks the whole model and lists every node that cannot be lowered, with the reason and what to "
        "do. Exits with status 1 if there are any.",
        example="check model.onnx",
    )
    k.add_argument("model", type=Path, help="the .onnx file")
    k.add_argument("--dim", action="append", default=[], metavar="NAME=SIZES", help=DIM)
    add_json(k)
    k.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from ..checking.check import check

    report = check(arguments.model, dims=parse_dims(arguments.dim))
    if arguments.json:
        print_json({"ok": report.ok, **asdict(report)})
    else:
        print(report)
    return 0 if report.ok else 1
