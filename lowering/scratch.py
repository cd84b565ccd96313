"""Arrays in temporary files: large results of a compilation, which need not fit into memory.

Inside `use_folder` they are mapped from nameless files in that folder, which end with the arrays. Small ones, and those
made elsewhere, are in memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from .errors import ArtifactError

_MIN_BYTES = 1 << 20  # of an array in a file

_folder: ContextVar[Path | None] = ContextVar("scratch_folder", default=None)


@contextmanager
def use_folder(folder: Path) -> Iterator[None]:
    """Map arrays from files in `folder`, or in the closest of its parents that exists."""
    path = Path(os.path.realpath(folder))
    while not path.is_dir() and path != path.parent:
        path = path.parent
    token = _folder.set(path)
    try:
        yield
    finally:
        _folder.reset(token)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of undefined elements.

    Raises:
        ArtifactError: The file system is full.
    """
    folder, size = _folder.get(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if folder is None or size < _MIN_BYTES:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a mapped page without room would end the process
            mapped = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise ArtifactError(
            "artifact.scratch_not_writable",
            f"{size / 2**20:.0f} MiB of weights cannot be written to a temporary file in '{folder}', the artifact's "
            f"parent: {error.strerror or error}. Make room there, or name another folder for the artifact.",
        ) from error
    return np.frombuffer(mapped, dtype).reshape(shape)


def store(array: np.ndarray) -> np.ndarray:
    """Return an array with the same elements, in a file if the array owns its memory; others are returned as given."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if _folder.get() is None or not root.flags.owndata or array.nbytes < _MIN_BYTES or array.dtype.hasobject:
        return array
    stored = empty(array.shape, array.dtype)
    stored[...] = array
    return stored
