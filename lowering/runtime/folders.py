"""Writing an artifact folder: the whole of it or nothing, and never less than what was there before."""

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

from ..errors import ArtifactError
from ..manifest import FILE, HEADER, HOST, MODEL, SETUP, SIGNATURE, WEIGHTS

# A writer's folder beside the artifact: new/ is what it writes, old/ what it has moved aside.
_WORK = ".onnx-lowering"
# How long another writer's few renames are waited for; who holds the parent's lock longer is no writer of ours.
_PATIENCE = 10.0  # seconds
_EXCHANGE = 2  # RENAME_EXCHANGE
# Answers of kernels and file systems that cannot exchange two folders.
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)


def is_part(name: str) -> bool:
    """Whether artifacts have a file of that name; only folders that hold nothing else are ever replaced."""
    names = (FILE, WEIGHTS, HEADER, HOST, SIGNATURE)
    return name in names or bool(re.fullmatch(rf"({MODEL}|{SETUP})(\.sm_\w+)?\.so", name))


def check_replaceable(folder: Path) -> None:
    """Raises ArtifactError where `folder` is there and is no artifact, nor empty."""
    try:
        found = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_file():
            return
        found = [folder.name]
    foreign = [name for name in found if folder.is_file() or not is_part(name)]
    if foreign:
        raise ArtifactError(
            f"'{folder}' holds '{foreign[0]}', which is no part of an artifact, and would be replaced. "
            "Name a new folder, or one that holds nothing but an artifact."
        )


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder beside `folder`, which takes its place when the block ends, and is removed if it raises.

    An artifact that is already there stays whole until then, also for processes that have it loaded, and both change
    places in one step where the kernel and the file system can; elsewhere the old one is put back if the second of two
    renames fails. What a killed writer has left is removed by the next one of the same folder. A symbolic link stays,
    and what it points to is replaced. Raises ArtifactError where `folder` holds something that is no artifact, or
    cannot be written.
    """
    target = Path(os.path.realpath(folder))
    try:
        check_replaceable(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.parent):
            for leftover in _works(target):
                _discard_if_dead(leftover, target)
            work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_WORK, dir=target.parent))
            alive = _lock(work)
        try:
            fresh = work / "new"
            fresh.mkdir()
            yield fresh
            if target.exists():
                _sync(fresh)
            with _alone(target.parent):
                check_replaceable(target)
                _put(fresh, target, work / "old")
        finally:
            try:
                _discard(work, target)
            finally:
                os.close(alive)
    except OSError as error:
        where = f": '{error.filename}'" if error.filename is not None else ""
        room = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = f" (its file system has {_free(target.parent) / 2**20:.0f} MiB left)"
        raise ArtifactError(
            f"'{folder}' cannot be written{room}: {error.strerror or error}{where}. What was there before is unchanged."
        ) from error


def being_replaced(folder: Path) -> Path | None:
    """Where a writer has moved the folder to that is missing, on file systems that cannot exchange two folders."""
    target = Path(os.path.realpath(folder))
    return next((work / "old" for work in _works(target) if (work / "old").is_dir()), None)


def _works(target: Path) -> list[Path]:
    """The folders of writers of `target`, at work or killed."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"\w+" + re.escape(_WORK))
    try:
        return [target.parent / name for name in os.listdir(target.parent) if pattern.fullmatch(name)]
    except OSError:
        return []


def _put(fresh: Path, target: Path, old: Path) -> None:
    if not target.exists():
        fresh.rename(target)
    elif not _exchange(fresh, target):
        target.rename(old)
        fresh.rename(target)  # if it fails, or never comes, _discard puts the old one back


def _exchange(first: Path, second: Path) -> bool:
    """Two folders change places in one step; False where that cannot be had."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    here = -100  # AT_FDCWD
    if rename(here, os.fsencode(first), here, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(second))


def _discard(work: Path, target: Path) -> None:
    """Removes a writer's folder; the artifact that it has moved aside goes back first, unless another is in place."""
    old = work / "old"
    if old.is_dir() and not target.exists():
        old.rename(target)
    shutil.rmtree(work)


def _discard_if_dead(work: Path, target: Path) -> None:
    try:
        held = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _discard(work, target)
    except OSError:  # its writer lives, or locks cannot be had here
        return
    finally:
        os.close(held)


def _lock(work: Path) -> int:
    """A descriptor whose lock says that the writer lives: the kernel lets go of it with the process."""
    held = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # a file system without locks: nobody removes leftovers there
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One writer at a time makes and moves folders in `folder`."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                break
        yield
    finally:
        os.close(held)


def _sync(folder: Path) -> None:
    """Until the files are on the disk: what they replace is removed, and a power cut shall not take both."""
    for path in (*folder.iterdir(), folder):
        held = os.open(path, os.O_RDONLY)
        try:
            os.fsync(held)
        finally:
            os.close(held)


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
