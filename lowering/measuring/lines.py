"""Files of records, one JSON line each, that only grow: a killed writer leaves its last line unfinished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append a line. Raises OSError."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def repair_lines(path: Path) -> None:
    """Truncate an unfinished last line; do nothing if the file does not exist. Raises OSError."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = len(whole_lines(data))
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def whole_lines(data: bytes) -> bytes:
    """Return the data without an unfinished last line."""
    return data[: data.rfind(b"\n") + 1]
