"""The command that writes an 8-bit model: quantize."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..deprecated import with_old_fields
from .json_output import add_json, print_json
from .options import load_call


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    q = add_parser(
        "quantize",
        help="write a float model with its matmuls in 8 bits, and tell the error by node",
        description="Makes a model of 8 bits of a float one by onnxruntime's tool, with scales from the calls that "
        "are given, or computed in each call, and tells how far every matmul and output is from the float model's.",
        example="quantize model.onnx -o model.int8.onnx --calls first.npz --calls second.npz",
    )
    q.add_argument("model", type=Path, help="the .onnx file")
    q.add_argument("-o", "--output", type=Path, required=True, help="the .onnx file to write")
    q.add_argument(
        "--calls", action="append", default=[], type=Path, metavar="FILE.npz", help="inputs by name of one call"
    )
    q.add_argument("--dynamic", action="store_true", help="scales from each call, also with --calls")
    q.add_argument("--weights", choices=("int8", "uint8"), default="int8", help="the type of weights (int8)")
    q.add_argument("--per-tensor", action="store_true", help="one scale for a matrix, not one for each column")
    q.add_argument("--exclude", action="append", default=[], metavar="NODE", help="a matmul that stays in floats")
    add_json(q)
    q.set_defaults(run=_quantize)


def _quantize(arguments: argparse.Namespace) -> int:
    from ..quantizing import quantize

    report = quantize(
        arguments.model,
        arguments.output,
        [load_call(path) for path in arguments.calls],
        "dynamic" if arguments.dynamic else None,
        arguments.weights,
        not arguments.per_tensor,
        arguments.exclude,
    )
    if arguments.json:
        print_json(with_old_fields(dataclasses.asdict(report)))
    else:
        print(report)
    return 0
