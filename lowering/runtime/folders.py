"""Writing an artifact folder: the whole of it or nothing."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArtifactError
from ..manifest import CODE, FILE, WEIGHTS


def is_part(name: str) -> bool:
    """Whether artifacts have a file of that name; only folders that hold nothing else are ever replaced."""
    return name in (FILE, CODE, WEIGHTS, "model.h", "host.hpp") or bool(re.fullmatch(r"model\.sm_\w+\.so", name))


# Bytes per write of weights. Linux keeps what one write brings in large pages where the file system can, and maps those
# of 2 MiB as such: a product that waits for its weights takes 0.6 to 0.9 of the time that it does with pages of 4 KiB.
LARGE_WRITE = 1 << 25


def copy(source: Path, target: Path) -> None:
    """A copy of a file, made in large writes."""
    with source.open("rb") as read, target.open("wb", buffering=0) as written:
        shutil.copyfileobj(read, written, LARGE_WRITE)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`, which takes its place when the block ends, and is removed if it raises.

    An artifact that is already there stays whole until then, also for processes that have it loaded. Raises
    ArtifactError where `folder` holds something that is no artifact.
    """
    folder = folder.absolute()
    found = sorted(os.listdir(folder)) if folder.is_dir() else [folder.name] if folder.exists() else []
    foreign = [name for name in found if folder.is_file() or not is_part(name)]
    if foreign:
        raise ArtifactError(
            f"'{folder}' holds '{foreign[0]}', which is no part of an artifact, and would be replaced. "
            "Name a new folder, or one that holds nothing but an artifact."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh, old = work / "new", work / "old"
        fresh.mkdir()
        yield fresh
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    finally:
        shutil.rmtree(work)
