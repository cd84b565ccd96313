"""The command that ships artifacts: package."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError
from .json_output import add_json, print_json


def add_command(add_parser: Callable[..., Any]) -> None:
    """Add the command and its options."""
    p = add_parser(
        "package",
        help="an artifact with its runtime and a C++ application, or as a wheel, ready to ship",
        description="Puts beside an artifact what a machine without a compiler needs of it: libraries, headers, a C++ "
        "application and CMake. With --wheel it becomes a typed Python package instead.",
        example="package out/ --to app.tar.gz\npackage --wheel out/ --to dist/ --name my-model --version 1.0.0",
    )
    p.add_argument("artifact", type=Path, help="the artifact folder")
    p.add_argument(
        "--to", type=Path, required=True, metavar="PLACE", help="a new folder, a file X.tar.gz, or a folder for wheels"
    )
    p.add_argument(
        "--runtime",
        type=Path,
        metavar="DIR",
        help="take libraries from wheels that pip installed with --target DIR",
    )
    p.add_argument("--wheel", action="store_true", help="write a Python package, which needs onnx-lowering-runtime")
    p.add_argument("--name", help="with --wheel: of the package (the artifact folder's)")
    p.add_argument("--version", help="with --wheel: of the package (0.1.0)")
    add_json(p)
    p.set_defaults(run=_package)


def _package(arguments: argparse.Namespace) -> int:
    if arguments.wheel:
        return _write_wheel(arguments)
    if arguments.name is not None or arguments.version is not None:
        raise InputError(
            "argument.option_requires_other", "--name and --version are only for --wheel. Give --wheel as well."
        )
    from ..packaging.folder import package_artifact

    manifest = package_artifact(arguments.artifact, arguments.to, arguments.runtime)
    if arguments.json:
        print_json({"output": arguments.to, "target": manifest.target})
    else:
        print(f"wrote {arguments.to} for {manifest.target}; its README.md says how to build and run")
    return 0


def _write_wheel(arguments: argparse.Namespace) -> int:
    from ..packaging.model_wheel import write_model_wheel

    if arguments.runtime is not None:
        raise InputError(
            "argument.conflicting_options",
            "--runtime is for C++ applications, but a --wheel needs onnx-lowering-runtime, which has the libraries. "
            "Leave --runtime out.",
        )
    path = write_model_wheel(arguments.artifact, arguments.to, arguments.name, arguments.version or "0.1.0")
    if arguments.json:
        print_json({"output": path})
    else:
        print(f"wrote {path}")
    return 0
