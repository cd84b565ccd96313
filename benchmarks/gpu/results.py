"""The file that keeps what a GPU host found: one entry per job, written as soon as it is there."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("limits", "checks", "sanitizer", "models", "steps", "cases")


@dataclass
class Results:
    """Entries by kind of job and name, of one bundle (its digest) and one GPU. An entry with "problem" failed."""

    bundle: str
    device: str
    date: str
    found: dict[str, dict[str, Any]] = field(default_factory=lambda: {kind: {} for kind in KINDS})

    def limit(self, unit: str) -> float | None:
        """Work per second, in "FLOP" or "byte"."""
        return self.found["limits"].get("limits", {}).get(unit)

    def has(self, kind: str, name: str) -> bool:
        """Whether the job is done and need not be tried again."""
        entry = self.found[kind].get(name)
        return entry is not None and "problem" not in entry

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1))
        os.replace(partial, path)


def read(path: Path) -> Results:
    return Results(**json.loads(path.read_text()))
