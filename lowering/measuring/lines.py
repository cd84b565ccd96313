"""Files of records, one JSON line each, that only grow: a writer that is killed leaves its last line unfinished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Adds a line. Raises OSError."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def repair_lines(path: Path) -> None:
    """Cuts off a last line without its end; nothing where there is no such file. Raises OSError."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = len(whole_lines(data))
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)


def whole_lines(data: bytes) -> bytes:
    """What comes before a line without its end."""
    return data[: data.rfind(b"\n") + 1]
