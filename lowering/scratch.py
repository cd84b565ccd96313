"""Arrays in temporary files: large results of a compilation, which need not fit into memory.

Inside `use_folder` they are mapped from nameless files in that folder, each for many arrays, since a process may open
few files. A file ends with its last array. Small arrays, and those made elsewhere, are in memory.
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
_FILE_BYTES = 1 << 30  # of a file, or one array if that is larger


class _Scratch:
    """The current file, mapped to its whole size before its bytes exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor = -1
        self._mapped: mmap.mmap | None = None
        self._used = 0

    def allocate(self, size: int) -> memoryview:
        """Return writable memory. Raises OSError."""
        if self._mapped is None or self._used + size > len(self._mapped):
            self._open(max(size, _FILE_BYTES))
        assert self._mapped is not None
        # Without room in the file system, a write to a mapped page would end the process.
        os.posix_fallocate(self._descriptor, self._used, size)
        begin = self._used
        self._used += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return memoryview(self._mapped)[begin : begin + size]

    def _open(self, size: int) -> None:
        self.close()
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.truncate(size)
            self._mapped, self._used = mmap.mmap(file.fileno(), size), 0
            self._descriptor = os.dup(file.fileno())

    def close(self) -> None:
        """Leave the file to its arrays."""
        if self._mapped is not None:
            os.close(self._descriptor)
            self._mapped = None


_scratch: ContextVar[_Scratch | None] = ContextVar("scratch", default=None)


@contextmanager
def use_folder(folder: Path) -> Iterator[None]:
    """Map arrays from files in `folder`, or in the closest of its parents that exists."""
    path = Path(os.path.realpath(folder))
    while not path.is_dir() and path != path.parent:
        path = path.parent
    scratch = _Scratch(path)
    token = _scratch.set(scratch)
    try:
        yield
    finally:
        _scratch.reset(token)
        scratch.close()


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of undefined elements.

    Raises:
        ArtifactError: The file system is full, or the folder cannot be written.
    """
    scratch, size = _scratch.get(), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if scratch is None or size < _MIN_BYTES:
        return np.empty(shape, dtype)
    try:
        memory = scratch.allocate(size)
    except OSError as error:
        raise ArtifactError(
            "artifact.scratch_not_writable",
            f"{size / 2**20:.0f} MiB of weights cannot be written to a temporary file in '{scratch.folder}', where the "
            f"artifact is written: {error.strerror or error}. Make room there, or name another folder for the artifact "
            "(TMPDIR for a model that is not saved).",
        ) from error
    return np.frombuffer(memory, dtype).reshape(shape)


def store(array: np.ndarray) -> np.ndarray:
    """Return an array with the same elements, in a file if the array owns its memory; others are returned as given."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if _scratch.get() is None or not root.flags.owndata or array.nbytes < _MIN_BYTES or array.dtype.hasobject:
        return array
    stored = empty(array.shape, array.dtype)
    stored[...] = array
    return stored
