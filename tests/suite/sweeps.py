"""Named sweeps of the slow tests: `pytest --sweep NAME`; `python -m tests.suite.sweeps` lists the names.

Each slow test belongs to one sweep, by its folder. A folder with many slow tests has several sweeps, and the name of
the test without its folder selects one: a moved file stays in its part. Each sweep ends within two hours on two cores.
"""

from __future__ import annotations

import json
import zlib

PARTS = {"cuda": 4, "ops": 3, "flex": 2, "rest": 1}
"""Number of sweeps by folder of tests/; `rest` has all other folders."""


def list_sweeps() -> list[str]:
    """Return the names of all sweeps."""
    return [f"{folder}-{part}" for folder, parts in PARTS.items() for part in range(1, parts + 1)]


def find_sweep(nodeid: str) -> str:
    """Return the sweep of a test by its name for pytest, which begins with tests/."""
    path, _, name = nodeid.partition("::")
    folders = path.split("/")
    folder = folders[1] if folders[1] in PARTS else "rest"
    return f"{folder}-{zlib.crc32(f'{folders[-1]}::{name}'.encode()) % PARTS[folder] + 1}"


if __name__ == "__main__":
    print(json.dumps(list_sweeps()))
