"""A cache of compiled kernels, in memory and on disk: calls that differ in values and lengths alone share a kernel.

The folder is that of ONNX_LOWERING_CACHE, else onnx-lowering/flex in the user's cache folder (XDG_CACHE_HOME, else
~/.cache). Kernels are native code: anyone with write access to the folder can run code as the user. Beyond 512 kernels
the least recently used ones are removed.
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
from ..runtime.artifact.folders import check_replaceable

if TYPE_CHECKING:
    import onnx

MAX_ON_DISK = 512
_MAX_CALLS = 4096


class KernelProblem(Protocol):
    """The specification of a kernel: hashable, with a repr that shows all of it."""

    def to_onnx(self) -> onnx.ModelProto:
        """Return the model to compile."""


class CacheInfo(NamedTuple):
    """Numbers of kernels since the process began or `cache_clear`: found in memory, found on disk, compiled.

    The last one is how many are in memory now.
    """

    hits: int
    disk_hits: int
    misses: int
    kept: int


@dataclass
class _KernelCache:
    models: dict[tuple[KernelProblem, str], Model] = field(default_factory=dict)
    calls: dict[Hashable, Model] = field(default_factory=dict)
    hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)


_cache = _KernelCache()


def cache_info() -> CacheInfo:
    """Return the counters of the kernel cache."""
    return CacheInfo(_cache.hits, _cache.disk_hits, _cache.misses, len(_cache.models))


def cache_clear(disk: bool = False) -> None:
    """Remove all kernels from memory and, with disk, those on disk.

    Args:
        disk: whether to remove the folder.
    """
    with _cache.lock:
        _cache.models.clear()
        _cache.calls.clear()
        _cache.hits = _cache.disk_hits = _cache.misses = 0
        if disk and (path := find_folder()) is not None:
            shutil.rmtree(path, ignore_errors=True)


def find_kernel(call: Hashable) -> Model | None:
    """Return the kernel of calls with this key, if there has been one."""
    model = _cache.calls.get(call)
    _cache.hits += model is not None
    return model


def remember_kernel(call: Hashable, model: Model) -> None:
    """Store the kernel for calls with this key."""
    if len(_cache.calls) >= _MAX_CALLS:
        _cache.calls.clear()
    _cache.calls[call] = model


def get_kernel(problem: KernelProblem, target: str) -> Model:
    """Return the compiled kernel."""
    with _cache.lock:
        model = _cache.models.get((problem, target))
        if model is not None:
            _cache.hits += 1
            return model
        model = _cache.models[problem, target] = _load_from_disk(problem, target) or _compile(problem, target)
        return model


def _compile(problem: KernelProblem, target: str) -> Model:
    from ..compiling.compiler import compile

    model = compile(problem.to_onnx(), target)
    _cache.misses += 1
    with suppress(LoweringError, OSError):  # a cache that cannot be written is not used
        cache_path = find_folder()
        if cache_path is not None:
            cache_folder.make_private_folder(cache_path)
            path = cache_path / _make_key(problem, target)
            _remove_foreign(path)
            model.save(path)
            _remove_oldest(cache_path)
    return model


def _load_from_disk(problem: KernelProblem, target: str) -> Model | None:
    cache_path = find_folder()
    if cache_path is None:
        return None
    path = cache_path / _make_key(problem, target)
    try:
        model = load(path)
    except (LoweringError, OSError):
        return None
    with suppress(OSError):
        os.utime(path)
    _cache.disk_hits += 1
    return model


def find_folder() -> Path | None:
    """Return the folder of kernels; None if others may write there."""
    return cache_folder.find_private_subfolder("flex")


def _remove_foreign(path: Path) -> None:
    """Remove a file or folder that is not a kernel from the path of one."""
    try:
        check_replaceable(path)
    except ArtifactError:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _remove_oldest(root: Path) -> None:
    kernels = [entry for entry in os.scandir(root) if re.fullmatch("[0-9a-f]{32}", entry.name)]
    by_time = sorted((entry.stat().st_mtime, entry.path) for entry in kernels)
    for _, path in by_time[:-MAX_ON_DISK]:
        shutil.rmtree(path, ignore_errors=True)


def _make_key(problem: KernelProblem, target: str) -> str:
    text = repr((problem, target, _read_versions(), sorted(cpu_flags())))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _read_versions() -> tuple[str, ...]:
    """Return the versions of the code generators.

    They are those of the packages, and the time stamps of the compiler's own files.
    """
    root = Path(__file__).parents[2]
    files = sorted(path for package in ("lowering", "schedules") for path in (root / package).rglob("*.py"))
    stamps = hashlib.sha256(repr([(p.name, p.stat().st_mtime_ns, p.stat().st_size) for p in files]).encode())
    return version("onnx-lowering"), version("apache-tvm"), stamps.hexdigest()
