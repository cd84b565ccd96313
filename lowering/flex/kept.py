"""Compiled kernels, kept in memory and on disk: what differs in nothing but values and lengths shares one.

The folder is that of ONNX_LOWERING_CACHE, else onnx-lowering/flex in the user's cache folder (XDG_CACHE_HOME, else
~/.cache). Kernels are native code: who can write there can run code as you. The least recently used of more than 512
are removed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .. import cache_folder
from ..errors import ArtifactError, LoweringError
from ..machine import cpu_flags
from ..runtime import Model, load
from ..runtime.folders import check_replaceable

if TYPE_CHECKING:
    import onnx

MOST_ON_DISK = 512
_KNOWN_CALLS = 4096


class Problem(Protocol):
    """What a kernel is made for: hashable, with a repr that says all of it."""

    def to_onnx(self) -> onnx.ModelProto:
        """The model to compile."""


class CacheInfo(NamedTuple):
    """Kernels that were found in memory, found on disk, and compiled, since the process began or `cache_clear`; and how
    many are in memory now."""

    hits: int
    disk_hits: int
    misses: int
    kept: int


@dataclass
class _Kept:
    models: dict[tuple[Problem, str], Model] = field(default_factory=dict)
    calls: dict[Hashable, Model] = field(default_factory=dict)
    hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)


_kept = _Kept()


def cache_info() -> CacheInfo:
    """What became of the kernels that were asked for."""
    return CacheInfo(_kept.hits, _kept.disk_hits, _kept.misses, len(_kept.models))


def cache_clear(disk: bool = False) -> None:
    """Forgets all kernels in memory and, with disk, those on disk."""
    with _kept.lock:
        _kept.models.clear()
        _kept.calls.clear()
        _kept.hits = _kept.disk_hits = _kept.misses = 0
        if disk and (place := folder()) is not None:
            shutil.rmtree(place, ignore_errors=True)


def known(call: Hashable) -> Model | None:
    """The kernel of calls of a kind, if there has been one."""
    found = _kept.calls.get(call)
    _kept.hits += found is not None
    return found


def remember(call: Hashable, model: Model) -> None:
    """The kernel serves calls of this kind."""
    if len(_kept.calls) >= _KNOWN_CALLS:
        _kept.calls.clear()
    _kept.calls[call] = model


def model_of(problem: Problem, target: str) -> Model:
    """The compiled kernel."""
    with _kept.lock:
        found = _kept.models.get((problem, target))
        if found is not None:
            _kept.hits += 1
            return found
        found = _kept.models[problem, target] = _from_disk(problem, target) or _compiled(problem, target)
        return found


def _compiled(problem: Problem, target: str) -> Model:
    from ..compiling.compiler import compile

    model = compile(problem.to_onnx(), target)
    _kept.misses += 1
    with suppress(LoweringError, OSError):  # a cache that cannot be written is none
        kept = folder()
        if kept is not None:
            cache_folder.make_private_folder(kept)
            place = kept / _key(problem, target)
            _remove_other(place)
            model.save(place)
            _remove_oldest(kept)
    return model


def _from_disk(problem: Problem, target: str) -> Model | None:
    kept = folder()
    if kept is None:
        return None
    place = kept / _key(problem, target)
    try:
        model = load(place)
    except (LoweringError, OSError):
        return None
    with suppress(OSError):
        os.utime(place)
    _kept.disk_hits += 1
    return model


def folder() -> Path | None:
    """Where kernels are kept; None where others may write."""
    return cache_folder.find_private_subfolder("flex")


def _remove_other(place: Path) -> None:
    """What is no kernel, and stands where one belongs."""
    try:
        check_replaceable(place)
    except ArtifactError:
        shutil.rmtree(place) if place.is_dir() else place.unlink()


def _remove_oldest(place: Path) -> None:
    kernels = [entry for entry in os.scandir(place) if re.fullmatch("[0-9a-f]{32}", entry.name)]
    found = sorted((entry.stat().st_mtime, entry.path) for entry in kernels)
    for _, path in found[:-MOST_ON_DISK]:
        shutil.rmtree(path, ignore_errors=True)


def _key(problem: Problem, target: str) -> str:
    text = repr((problem, target, _versions(), sorted(cpu_flags())))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _versions() -> tuple[str, ...]:
    """Of what makes the code: versions of the packages, and when each of our files was written."""
    root = Path(__file__).parents[2]
    files = sorted(path for package in ("lowering", "schedules") for path in (root / package).rglob("*.py"))
    stamps = hashlib.sha256(repr([(p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in files]).encode())
    return version("onnx-lowering"), version("apache-tvm"), stamps.hexdigest()
