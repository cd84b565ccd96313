"""Fingerprints of compilers and of this project's sources, for the keys of cached objects."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("lowering", "schedules")
_LIBRARIES = ("apache-tvm", "apache-tvm-ffi", "onnx", "onnx-ir", "numpy", "nvidia-cuda-nvrtc", "cuda-bindings")


@functools.cache
def list_libraries() -> tuple[str, ...]:
    """Return the versions of the installed packages that affect compilation."""
    versions = []
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return tuple(versions)


@functools.cache
def sources() -> str:
    """Return the digest of this project's files that affect compilation, and of the version of TVM."""
    digest = hashlib.sha256(version("apache-tvm").encode())
    for name in _PACKAGES:
        package = find_spec(name)
        assert package is not None and package.submodule_search_locations
        root = Path(package.submodule_search_locations[0])
        for path in sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def fingerprint_program(name: str) -> tuple[object, ...]:
    """Return the fingerprint of a program's file; raise OSError if there is none."""
    path = shutil.which(name) or name  # one file may be several compilers, selected by its name
    stat = os.stat(path)
    return path, os.path.realpath(path), stat.st_size, stat.st_mtime_ns
