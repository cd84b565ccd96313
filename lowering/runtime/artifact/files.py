"""Open files of one artifact, which remain readable after they are replaced, renamed or removed."""

from __future__ import annotations

import os
import stat
import time
import weakref
from pathlib import Path

from ...errors import ArtifactError
from .folders import find_moved_folder, is_artifact_file

# Bytes per read of weights.
_CHUNK_BYTES = 1 << 25
# Most bytes that are read at once, for all files except weights.
_MAX_READ_BYTES = 1 << 31
# How long `_open_all` waits for a folder that is being replaced in two steps.
_PATIENCE = 2.0  # seconds


class ArtifactFiles:
    """Descriptors of all files in an artifact folder, which belong to a single write of it.

    Reads give the position, so that any number of threads and forked processes may share the descriptors. Raises
    ArtifactError for a folder that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors = _open_all(folder)
        weakref.finalize(self, _close_all, self._descriptors)

    def __contains__(self, name: str) -> bool:
        return name in self._descriptors

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        return os.fstat(self._descriptors[name]).st_size

    def read(self, name: str, position: int = 0, count: int | None = None) -> bytes:
        """Return `count` bytes of a file, or all of it; fewer at its end.

        Raises ArtifactError for read errors and for more than 2 GiB.
        """
        count = self.size(name) - position if count is None else count
        if count > _MAX_READ_BYTES:
            size = f"{self.size(name) / 2**30:.1f} GiB"
            raise ArtifactError(
                "artifact.file_too_large",
                f"'{self.folder / name}' has {size}, more than a file of an artifact: it is damaged. "
                "Compile the model again.",
            )
        buffer = bytearray(count)
        return bytes(buffer[: self.read_into(name, memoryview(buffer), position)])

    def read_into(self, name: str, buffer: memoryview, position: int = 0) -> int:
        """Fill the buffer, and return the number of bytes read, which is smaller at the end of the file.

        Raises ArtifactError.
        """
        done = 0
        try:
            while done < len(buffer):
                read = os.preadv(self._descriptors[name], [buffer[done : done + _CHUNK_BYTES]], position + done)
                if read == 0:
                    break
                done += read
        except OSError as error:
            raise ArtifactError(
                "artifact.file_unreadable", f"'{self.folder / name}' cannot be read: {error.strerror}."
            ) from error
        return done

    def copy(self, name: str, target: Path) -> None:
        """Write a copy of a file. Raises OSError."""
        with target.open("wb", buffering=0) as output:
            position = 0
            while sent := os.sendfile(output.fileno(), self._descriptors[name], position, _CHUNK_BYTES):
                position += sent


def _explain_missing_artifact(path: Path) -> str:
    """Return why nothing can be loaded from a path that is missing or not a folder."""
    if not path.exists():
        return f"there is no folder '{path}'. An artifact is a folder that `onnx-lowering compile` writes."
    what = "a model file" if path.suffix == ".onnx" else "a file"
    model = path.name if path.suffix == ".onnx" else "MODEL.onnx"
    return f"'{path}' is not an artifact: it is {what}: compile it first, by `onnx-lowering compile {model} -o out/`."


def _open_all(folder: Path) -> dict[str, int]:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            descriptors = _open_once(folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            moved_folder = find_moved_folder(folder)
            if moved_folder and time.monotonic() > end:
                raise ArtifactError(
                    "artifact.folder_moved",
                    f"'{folder}' has been moved aside by a writer that was ended: "
                    f"write it again, or rename '{moved_folder}' back.",
                ) from error
            if not moved_folder and not folder.is_dir():
                raise ArtifactError("artifact.folder_missing", _explain_missing_artifact(folder)) from error
            time.sleep(0.001)
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ArtifactError("artifact.folder_unreadable", f"'{folder}' cannot be read: {reason}.") from error
        if descriptors is not None:
            return descriptors


def _open_once(folder: Path) -> dict[str, int] | None:
    """Open the files, by name. Return None if the folder was replaced meanwhile."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    directory = os.open(folder, flags | os.O_DIRECTORY)
    descriptors: dict[str, int] = {}
    is_complete = False
    try:
        for name in filter(is_artifact_file, os.listdir(directory)):
            try:
                descriptors[name] = os.open(name, flags | os.O_NONBLOCK, dir_fd=directory)
            except FileNotFoundError:  # a link to nothing, or the folder has been replaced
                continue
            if not stat.S_ISREG(os.fstat(descriptors[name]).st_mode):
                os.close(descriptors.pop(name))
        current, opened = os.stat(folder), os.fstat(directory)
        is_complete = (current.st_dev, current.st_ino) == (opened.st_dev, opened.st_ino)
        return descriptors if is_complete else None
    finally:
        os.close(directory)
        if not is_complete:
            _close_all(descriptors)


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
