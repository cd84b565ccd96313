"""The command that makes a model of 8 bits: quantise."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .options import call
from .written import written


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    q = add_parser("quantise", help="write a float model with its products in 8 bits, and tell the error by node")
    q.add_argument("model", type=Path, help="the .onnx file")
    q.add_argument("-o", "--output", type=Path, required=True, help="the .onnx file to write")
    q.add_argument(
        "--calls", action="append", default=[], type=Path, metavar="FILE.npz", help="inputs by name of one call"
    )
    q.add_argument("--dynamic", action="store_true", help="scales from each call, also with --calls")
    q.add_argument("--weights", choices=("int8", "uint8"), default="int8", help="the type of weights (int8)")
    q.add_argument("--per-tensor", action="store_true", help="one scale for a matrix, not one for each column")
    q.add_argument("--exclude", action="append", default=[], metavar="NODE", help="a product that stays in floats")
    q.add_argument("--json", type=Path, metavar="FILE", help="write the report, with all nodes")
    q.set_defaults(run=_quantise)


def _quantise(arguments: argparse.Namespace) -> int:
    from ..quantising import quantise

    report = quantise(
        arguments.model,
        arguments.output,
        [call(path) for path in arguments.calls],
        "dynamic" if arguments.dynamic else None,
        arguments.weights,
        not arguments.per_tensor,
        arguments.exclude,
    )
    print(report)
    if arguments.json is not None:
        with written(arguments.json) as path:
            path.write_text(report.to_json())
    return 0
