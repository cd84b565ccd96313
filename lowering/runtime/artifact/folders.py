"""Write an artifact folder atomically: the previous folder remains until the new one is complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import ArtifactError
from ...manifest import FILE, HEADER, HOST, LOADER, MODEL, OBJECT, SETUP, SIGNATURE, WEIGHTS, WEIGHTS_SOURCE

# A writer's folder next to the artifact: new/ is its output, old/ the folder that it has moved aside.
_WORK_SUFFIX = ".onnx-lowering"
# How long a writer waits for the few renames of another one. A longer lock on the parent belongs to another program.
_PATIENCE = 10.0  # seconds
_EXCHANGE = 2  # RENAME_EXCHANGE
# Error numbers of kernels and file systems that cannot exchange two folders.
_EXCHANGE_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)


def is_artifact_file(name: str) -> bool:
    """Return whether artifacts have a file of that name. Folders with any other file are never replaced."""
    names = (FILE, WEIGHTS, HEADER, HOST, SIGNATURE, OBJECT, WEIGHTS_SOURCE, *LOADER)
    return name in names or bool(re.fullmatch(rf"({MODEL}|{SETUP})(\.sm_\w+)?\.so", name))


def check_replaceable(folder: Path) -> None:
    """Raise ArtifactError if `folder` exists and is neither an artifact nor empty."""
    try:
        entries = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_file():
            return
        entries = [folder.name]
    foreign_entries = [name for name in entries if folder.is_file() or not is_artifact_file(name)]
    if foreign_entries:
        raise ArtifactError(
            "artifact.folder_not_replaceable",
            f"'{folder}' contains '{foreign_entries[0]}', which is not part of an artifact, and would be replaced. "
            "Name a new folder, or one that contains only an artifact.",
        )


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a new folder next to `folder`, which replaces it when the block ends.

    If the block raises, the new folder is removed. An existing artifact stays complete until then, also for processes
    that have loaded it. Both folders are exchanged in one step if the kernel and the file system support it. Elsewhere
    two renames are needed, and the old folder is moved back if the second one fails. The next writer of the same folder
    removes the remains of a killed one. A symbolic link stays, and its target is replaced. Raises ArtifactError if
    `folder` has content that is not an artifact, or cannot be written.
    """
    target = Path(os.path.realpath(folder))
    try:
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock_folder(target.parent):
            for leftover in _list_work_folders(target):
                _discard_if_dead(leftover, target)
            work_folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_WORK_SUFFIX, dir=target.parent))
            work_lock = _lock(work_folder)
        try:
            new_folder = work_folder / "new"
            new_folder.mkdir()
            yield new_folder
            if target.exists():
                _sync(new_folder)
            with _lock_folder(target.parent):
                check_replaceable(target)
                _put(new_folder, target, work_folder / "old")
        finally:
            try:
                _discard(work_folder, target)
            finally:
                os.close(work_lock)
    except OSError as error:
        where = f": '{error.filename}'" if error.filename is not None else ""
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = f" (its file system has {_read_free_space(target.parent) / 2**20:.0f} MiB left)"
        raise ArtifactError(
            "artifact.folder_not_writable",
            f"'{folder}' cannot be written{room}: {error.strerror or error}{where}. "
            "What was there before is unchanged.",
        ) from error


def find_moved_folder(folder: Path) -> Path | None:
    """Return the path to which a writer has moved a missing folder, or None.

    Writers move folders only on file systems that cannot exchange two of them.
    """
    target = Path(os.path.realpath(folder))
    return next((work / "old" for work in _list_work_folders(target) if (work / "old").is_dir()), None)


def _list_work_folders(target: Path) -> list[Path]:
    """Return the folders of running and killed writers of `target`."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"\w+" + re.escape(_WORK_SUFFIX))
    try:
        return [target.parent / name for name in os.listdir(target.parent) if pattern.fullmatch(name)]
    except OSError:
        return []


def _put(new_folder: Path, target: Path, old: Path) -> None:
    if not target.exists():
        new_folder.rename(target)
    elif not _exchange(new_folder, target):
        target.rename(old)
        new_folder.rename(target)  # after a failure here _discard moves the old folder back


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one step. Return False if that is not supported."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    current_folder = -100  # AT_FDCWD
    if rename(current_folder, os.fsencode(first), current_folder, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _EXCHANGE_UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second))


def _discard(work: Path, target: Path) -> None:
    """Remove a writer's folder. Before, move back the artifact in it, unless `target` exists."""
    old = work / "old"
    if old.is_dir() and not target.exists():
        old.rename(target)
    shutil.rmtree(work)


def _discard_if_dead(work: Path, target: Path) -> None:
    try:
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _discard(work, target)
    except OSError:  # its writer is running, or locks are not supported here
        return
    finally:
        os.close(descriptor)


def _lock(work: Path) -> int:
    """Return a descriptor whose lock marks the writer as running. The kernel releases it with the process."""
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # without locks nobody removes leftovers
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder: only one writer at a time creates and moves folders in it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Flush the files to disk, since they replace an artifact that a power cut must not destroy."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_free_space(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
