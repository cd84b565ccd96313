"""Cache of object code on disk: kernels compiled once by the same compiler for the same machine are only linked.

The files are in `objects` of the cache folder (cache_folder.py). Kernels have keys of their scheduled code
(objects.py). A second kind of file maps the key of an unscheduled kernel to that key. A third kind has the C code that
all libraries include (bundled_sources.py). A file is written completely under another name and then renamed, and
contains the digest of its bytes: writers may race or be killed. The least recently used files are removed if the total
exceeds MAX_BYTES.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ... import cache_folder

MAX_BYTES = 1 << 30
_DIGEST = hashlib.sha256().digest_size
OBJECT, MADE_OF, CARRIED = ".object", ".made_of", ".carried"
"""Kinds of files: kernels, the key of a kernel by its unscheduled function, and C code that all libraries have."""

_KINDS = (OBJECT, MADE_OF, CARRIED)
_TRIMMED, _SELDOM = ".trimmed", 600.0  # seconds
_ABANDONED = 3600.0  # seconds after which a file that is still being written is abandoned


def folder() -> Path | None:
    """Return the folder of objects, None if other users may write to it."""
    return cache_folder.find_private_subfolder("objects")


def get(key: str, kind: str = OBJECT) -> bytes | None:
    """Return the content under the key, a file name, if it exists and is intact."""
    cache = folder()
    if cache is None:
        return None
    path = cache / f"{key}{kind}"
    try:
        content = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    code = content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == content[:_DIGEST] else None


def put(key: str, content: bytes, kind: str = OBJECT) -> None:
    """Store the content if possible: a cache that is not writable is skipped."""
    cache = folder()
    if cache is None:
        return
    with suppress(OSError):
        cache_folder.make_private_folder(cache)
        handle, name = tempfile.mkstemp(dir=cache, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(name, cache / f"{key}{kind}")
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


def size() -> tuple[int, int]:
    """Return the number of kernels, and the bytes of all files."""
    sizes = [(path.suffix, stat.st_size) for path, stat in _files()]
    return sum(kind == OBJECT for kind, _ in sizes), sum(size for _, size in sizes)


def clear() -> None:
    """Remove all files."""
    for path, _ in _files():
        with suppress(OSError):
            os.unlink(path)


def trim_seldom() -> None:
    """Trim the cache, unless a process did recently: listing many files takes longer than compiling one kernel."""
    cache = folder()
    if cache is None:
        return
    stamp = cache / _TRIMMED
    with suppress(OSError):
        if stamp.exists() and abs(time.time() - stamp.stat().st_mtime) < _SELDOM:
            return
        stamp.touch()
        trim()


def trim(max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used files beyond max_bytes of disk, and files left by killed writers."""
    entries = sorted(_files(), key=lambda entry: -entry[1].st_mtime)
    total = 0
    for path, stat in entries:
        total += max(stat.st_size, stat.st_blocks * 512)
        if total > max_bytes if path.suffix in _KINDS else stat.st_mtime < time.time() - _ABANDONED:
            with suppress(OSError):
                os.unlink(path)


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    """Yield all files, including those that are being written."""
    cache = folder()
    if cache is None:
        return
    with suppress(OSError), os.scandir(cache) as entries:
        for entry in entries:
            with suppress(OSError):
                yield Path(entry.path), entry.stat()
