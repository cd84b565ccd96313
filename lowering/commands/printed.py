"""What commands print for programs: with --json one document on stdout, and nothing else there."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option, the same for every command that has it."""
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else on stdout")


def print_json(document: Any) -> None:
    """Prints it. Paths become text, and numbers that are not finite null: JSON has none."""
    print(json.dumps(_plain(document), indent=1))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
