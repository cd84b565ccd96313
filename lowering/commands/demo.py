"""The command that shows the main use case: demo."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    d = add_parser(
        "demo",
        help="build, compile, load and run a small decoder with in-place caches",
        description="Does the main job once, from nothing: builds a decoder, compiles it, loads it in a process that "
        "has no compiler, generates tokens and checks them against the ONNX reference.",
        example="demo -o demo/",
    )
    d.add_argument("-o", "--output", type=Path, help="keep the model and its artifact in this folder")
    d.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from ..demo import demo

    return demo(arguments.output)
