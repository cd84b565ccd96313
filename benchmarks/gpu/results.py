"""The file that keeps what a GPU host found: one entry per job, written as soon as it is there."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

KINDS = (
    *("limits", "missing", "checks", "sanitizer", "models", "steps", "cases"),
    *("weights", "experts", "flex", "decoders"),
)


@dataclass
class Results:
    """Entries by kind of job and name, of one bundle (its digest) and one GPU. An entry with "problem" failed.

    "missing" has, by what is not there on the host or in the bundle, {"note": why}.
    """

    bundle: str
    device: str
    date: str
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.found = {kind: self.found.get(kind, {}) for kind in KINDS}

    def has(self, kind: str, name: str) -> bool:
        """Return whether the job is done and need not be tried again."""
        entry = self.found[kind].get(name)
        return entry is not None and "problem" not in entry


class Store:
    """The results of a bundle on a GPU, in a file of their own in several folders."""

    def __init__(self, folders: list[Path], bundle: str, device: str) -> None:
        """Continue with the contents of the first folder that has the file.

        Raises OSError where the first folder cannot be made.
        """
        card = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        self._paths = [folder / f"results-{card}-{bundle}.json" for folder in folders]
        self.path = self._paths[0]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        there = [path for path in self._paths if path.exists()]
        self.results = read(there[0]) if there else Results(bundle, device, date.today().isoformat())

    def add(self, kind: str, name: str, entry: dict[str, Any]) -> None:
        """Store an entry in every folder; print which folder cannot be written, and go on."""
        self.results.found[kind][name] = entry
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(self.results, path)
            except OSError as error:
                print(f"{path}: {error}", flush=True)


def _write(results: Results, path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(results), indent=1))
    os.replace(partial, path)


def read(path: Path) -> Results:
    return Results(**json.loads(path.read_text()))
