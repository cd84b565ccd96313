"""Object code, kept on disk: what was compiled once by the same compiler for the same machine is only linked.

The files lie in `objects` of the cache folder (cache_folder.py): kernels under the key of what they were scheduled to
(objects.py), that key under one of what they were made of, and the C code that all libraries carry (carried.py). A file
is written whole under another name and then renamed, and says what its bytes must be: writers may race or be killed.
The least recently used ones go when all together are more than MOST bytes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .. import cache_folder

MOST = 1 << 30
_DIGEST = hashlib.sha256().digest_size
OBJECT, MADE_OF, CARRIED = ".object", ".made_of", ".carried"
"""Kinds of files: kernels, the key of a kernel by what it was made of, and C code that all libraries have."""

_KINDS = (OBJECT, MADE_OF, CARRIED)
_TRIMMED, _SELDOM = ".trimmed", 600.0  # seconds
_ABANDONED = 3600.0  # seconds after which a file that is still being written is nobody's


def folder() -> Path | None:
    """Where objects are kept; None where others may write."""
    return cache_folder.part("objects")


def get(key: str, kind: str = OBJECT) -> bytes | None:
    """What was kept under the key, a file name, if it is there and whole."""
    place = folder()
    if place is None:
        return None
    path = place / f"{key}{kind}"
    try:
        content = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    found = content[_DIGEST:]
    return found if hashlib.sha256(found).digest() == content[:_DIGEST] else None


def put(key: str, content: bytes, kind: str = OBJECT) -> None:
    """Keeps it, where that can be written: a cache that cannot is none."""
    place = folder()
    if place is None:
        return
    with suppress(OSError):
        cache_folder.make(place)
        handle, name = tempfile.mkstemp(dir=place, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(name, place / f"{key}{kind}")
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def size() -> tuple[int, int]:
    """How many kernels there are, and the bytes of all files."""
    found = [(path.suffix, stat.st_size) for path, stat in _files()]
    return sum(kind == OBJECT for kind, _ in found), sum(size for _, size in found)


def clear() -> None:
    """Removes all."""
    for path, _ in _files():
        with suppress(OSError):
            os.unlink(path)


def trim_seldom() -> None:
    """Trims, unless somebody has lately: to look at many files takes longer than to compile one."""
    place = folder()
    if place is None:
        return
    stamp = place / _TRIMMED
    with suppress(OSError):
        if stamp.exists() and abs(time.time() - stamp.stat().st_mtime) < _SELDOM:
            return
        stamp.touch()
        trim()


def trim(most: int = MOST) -> None:
    """Removes the least recently used ones beyond so many bytes of disk, and what killed writers left."""
    found = sorted(_files(), key=lambda entry: -entry[1].st_mtime)
    total = 0
    for path, stat in found:
        total += max(stat.st_size, stat.st_blocks * 512)
        if total > most if path.suffix in _KINDS else stat.st_mtime < time.time() - _ABANDONED:
            with suppress(OSError):
                os.unlink(path)


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    """All files, those that are being written too."""
    place = folder()
    if place is None:
        return
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            with suppress(OSError):
                yield Path(entry.path), entry.stat()
