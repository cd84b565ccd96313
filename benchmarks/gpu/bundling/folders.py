"""Folders of a bundle that are written anew."""

from __future__ import annotations

import shutil
from pathlib import Path


def make_empty(folder: Path) -> Path:
    """Return the folder, emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
