"""The folder in which compiled code is kept for the next process. It is used where nobody else may write to it.

What lies there runs with the rights of who uses it, as programs do. As ssh does with its files, the owner and the modes
of the folder and of all above it are looked at, and new ones are made for their owner alone.
"""

from __future__ import annotations

import functools
import grp
import logging
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

LOG = logging.getLogger("lowering")


def cache_folder() -> Path:
    """Return where it is: ONNX_LOWERING_CACHE, else in the user's cache folder."""
    named = os.environ.get("ONNX_LOWERING_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(named) if named else Path(base) / "onnx-lowering"


def part(name: str) -> Path | None:
    """Return a folder in it, whether it is there or not, without links; None where others may write."""
    folder = cache_folder() / name
    with suppress(OSError, RuntimeError):  # a loop of links
        folder = folder.resolve()
    return folder if _is_private(folder) else None


def make(folder: Path) -> None:
    """Make a folder and those above it that are missing, all for their owner alone. Raises OSError."""
    for each in reversed([folder, *folder.parents]):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)


def distrusted(folder: Path) -> str | None:
    """Return why somebody else may write what lies in a folder, which need not be there; None if nobody may."""
    try:
        here = folder.resolve()
    except (OSError, RuntimeError) as error:
        return f"'{folder}' cannot be looked at: {error}"
    own = (0, os.geteuid())
    for path in (here, *here.parents):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"'{path}' cannot be looked at: {error.strerror}"
        if found.st_uid not in own:
            return f"'{path}' belongs to user {found.st_uid}"
        others = stat.S_IWOTH if _is_alone(found.st_gid, found.st_uid) else stat.S_IWOTH | stat.S_IWGRP
        # In a folder with the sticky bit, such as /tmp, others cannot remove or rename what is not theirs.
        if found.st_mode & others and (path == here or not found.st_mode & stat.S_ISVTX):
            return f"others may write to '{path}' (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _is_alone(group: int, owner: int) -> bool:
    """Whether nobody but the owner is in a group, as where each user has a group of the same name."""
    try:
        members, user = grp.getgrgid(group).gr_mem, pwd.getpwuid(owner)
    except KeyError:
        return False
    return user.pw_gid == group and group != 0 and not set(members) - {user.pw_name}


@functools.cache
def _is_private(folder: Path) -> bool:
    why = distrusted(folder)
    if why is not None:
        LOG.warning(
            "the cache '%s' is not used: %s, and code from there would run as you. Make it yours alone (chmod go-w), "
            "or set ONNX_LOWERING_CACHE to a folder that is.",
            folder,
            why,
        )
    return why is None
