"""JSON output of commands: with --json, one document on stdout, and nothing else there."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option --json, which is the same for all commands."""
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else on stdout")


def print_json(document: Any) -> None:
    """Print a document; paths become text, and numbers that are not finite null, which JSON does not have."""
    print(json.dumps(_to_json(document), indent=1))


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
