"""The folder of compiled code for later processes. It is used only where no other user may write to it.

Code in it runs with the rights of its user, as programs do. As ssh does with its files, the compiler checks owner and
mode of the folder and of all parents. New folders are created for their owner alone.
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
    """Return the folder: ONNX_LOWERING_CACHE, else one in the user's cache folder."""
    override = os.environ.get("ONNX_LOWERING_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(override) if override else Path(base) / "onnx-lowering"


def find_private_subfolder(name: str) -> Path | None:
    """Return a resolved subfolder, which need not exist, or None if other users may write to it."""
    folder = cache_folder() / name
    with suppress(OSError, RuntimeError):  # a loop of links
        folder = folder.resolve()
    return folder if _is_private(folder) else None


def make_private_folder(folder: Path) -> None:
    """Make a folder and its missing parents, all for their owner alone.

    Raises:
        OSError: A folder cannot be made.
    """
    for missing in reversed([folder, *folder.parents]):
        if not missing.is_dir():
            missing.mkdir(mode=0o700, exist_ok=True)


def find_distrust_reason(folder: Path) -> str | None:
    """Return the reason why another user may write to a folder, which need not exist, or None."""
    try:
        resolved = folder.resolve()
    except (OSError, RuntimeError) as error:
        return f"'{folder}' cannot be read: {error}"
    trusted_owners = (0, os.geteuid())
    for path in (resolved, *resolved.parents):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"'{path}' cannot be read: {error.strerror}"
        if status.st_uid not in trusted_owners:
            return f"'{path}' belongs to user {status.st_uid}"
        write_bits = stat.S_IWOTH if _has_own_group(status.st_gid, status.st_uid) else stat.S_IWOTH | stat.S_IWGRP
        # In a folder with the sticky bit, such as /tmp, users cannot remove or rename files of other users.
        if status.st_mode & write_bits and (path == resolved or not status.st_mode & stat.S_ISVTX):
            return f"others may write to '{path}' (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _has_own_group(group: int, owner: int) -> bool:
    """Return whether only the owner is in a group, as where each user has a group of the same name."""
    try:
        members, user = grp.getgrgid(group).gr_mem, pwd.getpwuid(owner)
    except KeyError:
        return False
    return user.pw_gid == group and group != 0 and not set(members) - {user.pw_name}


@functools.cache
def _is_private(folder: Path) -> bool:
    reason = find_distrust_reason(folder)
    if reason is not None:
        LOG.warning(
            "the cache '%s' is not used: %s, and code from there would run as you. Make it yours alone (chmod go-w), "
            "or set ONNX_LOWERING_CACHE to a folder that is.",
            folder,
            reason,
        )
    return reason is None
