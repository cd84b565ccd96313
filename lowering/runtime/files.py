"""The files of one artifact, held open: their holder does not mind what replaces, renames or removes them."""

from __future__ import annotations

import os
import stat
import time
import weakref
from pathlib import Path

from ..errors import ArtifactError
from .folders import being_replaced, is_part

# Bytes per read of weights.
_LARGE = 1 << 25
# The largest number of bytes that are read at once: of all files but weights.
_MOST = 1 << 31
# How long a folder that is being replaced in two steps is waited for.
_PATIENCE = 2.0  # seconds


class Files:
    """Descriptors of all files in an artifact folder, which belong to one writing of it.

    They are read by position, so that any number of threads and forked processes may. Raises ArtifactError for a
    folder that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held = _open(folder)
        weakref.finalize(self, _close, self._held)

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return os.fstat(self._held[name]).st_size

    def read(self, name: str, position: int = 0, count: int | None = None) -> bytes:
        """`count` bytes of a file, or all; fewer where it ends. Raises ArtifactError, also for more than 2 GiB."""
        count = self.size(name) - position if count is None else count
        if count > _MOST:
            size = f"{self.size(name) / 2**30:.1f} GiB"
            raise ArtifactError(f"'{self.folder / name}' has {size}, and no artifact has such a file: it is damaged.")
        buffer = bytearray(count)
        return bytes(buffer[: self.read_into(name, memoryview(buffer), position)])

    def read_into(self, name: str, buffer: memoryview, position: int = 0) -> int:
        """Fills the buffer; the number of bytes read, less than it holds where the file ends. Raises ArtifactError."""
        done = 0
        try:
            while done < len(buffer):
                read = os.preadv(self._held[name], [buffer[done : done + _LARGE]], position + done)
                if read == 0:
                    break
                done += read
        except OSError as error:
            raise ArtifactError(f"'{self.folder / name}' cannot be read: {error.strerror}.") from error
        return done

    def copy(self, name: str, target: Path) -> None:
        """Writes a copy of a file. Raises OSError where it cannot be written."""
        with target.open("wb", buffering=0) as written:
            position = 0
            while sent := os.sendfile(written.fileno(), self._held[name], position, _LARGE):
                position += sent


def _no_artifact(path: Path) -> str:
    """Return why nothing can be loaded from there: it is not a folder, or nothing."""
    if not path.exists():
        return f"there is no folder '{path}'. An artifact is a folder that `onnx-lowering compile` writes."
    what = "a model file" if path.suffix == ".onnx" else "a file"
    model = path.name if path.suffix == ".onnx" else "MODEL.onnx"
    return f"'{path}' is not an artifact: it is {what}: compile it first, by `onnx-lowering compile {model} -o out/`."


def _open(folder: Path) -> dict[str, int]:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            held = _open_once(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            moved = being_replaced(folder)
            if moved and time.monotonic() > end:
                raise ArtifactError(
                    f"'{folder}' has been moved aside by a writer that was ended: "
                    f"write it again, or rename '{moved}' back."
                ) from error
            if not moved and not folder.is_dir():
                raise ArtifactError(_no_artifact(folder)) from error
            time.sleep(0.001)
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError(f"'{folder}' cannot be read: {reason}.") from error
        if held is not None:
            return held


def _open_once(folder: Path) -> dict[str, int] | None:
    """The files by name; None if another artifact came in the folder's place while they were opened."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    directory = os.open(folder, flags | os.O_DIRECTORY)
    held: dict[str, int] = {}
    complete = False
    try:
        for name in filter(is_part, os.listdir(directory)):
            try:
                held[name] = os.open(name, flags | os.O_NONBLOCK, dir_fd=directory)
            except FileNotFoundError:  # a link to nothing, or the folder has been replaced
                continue
            if not stat.S_ISREG(os.fstat(held[name]).st_mode):
                os.close(held.pop(name))
        here, opened = os.stat(folder), os.fstat(directory)
        complete = (here.st_dev, here.st_ino) == (opened.st_dev, opened.st_ino)
        return held if complete else None
    finally:
        os.close(directory)
        if not complete:
            _close(held)


def _close(held: dict[str, int]) -> None:
    while held:
        os.close(held.popitem()[1])
