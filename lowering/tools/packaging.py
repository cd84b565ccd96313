"""The command that ships artifacts: package."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add(add_parser: Callable[..., Any]) -> None:
    """Its options."""
    p = add_parser("package", help="an artifact with runtime libraries, headers and a C++ application, ready to ship")
    p.add_argument("artifact", type=Path, help="the artifact folder")
    p.add_argument("--to", type=Path, required=True, metavar="PLACE", help="a new folder, or a file that is X.tar.gz")
    p.add_argument(
        "--runtime",
        type=Path,
        metavar="DIR",
        help="take libraries from wheels that pip installed with --target DIR",
    )
    p.set_defaults(run=_package)


def _package(arguments: argparse.Namespace) -> int:
    from ..packaging.folder import package

    manifest = package(arguments.artifact, arguments.to, arguments.runtime)
    print(f"wrote {arguments.to} for {manifest.target}; its README.md says how to build and run")
    return 0
