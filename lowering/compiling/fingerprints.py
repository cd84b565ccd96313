"""What tells a compiler, or a state of this project's sources, from the next: for the keys of what is kept."""

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
def libraries() -> tuple[str, ...]:
    """Versions of the packages that have a part in compiling, of those that are installed."""
    found = []
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return tuple(found)


@functools.cache
def sources() -> str:
    """Digest of the files of this project that have a part in compiling, and of the version of TVM."""
    digest = hashlib.sha256(version("apache-tvm").encode())
    for name in _PACKAGES:
        package = find_spec(name)
        assert package is not None and package.submodule_search_locations
        root = Path(package.submodule_search_locations[0])
        for path in sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def program(name: str) -> tuple[object, ...]:
    """A program by its file. Raises OSError if there is none."""
    path = shutil.which(name) or name  # one file may be several compilers, by the name that it is called by
    stat = os.stat(path)
    return path, os.path.realpath(path), stat.st_size, stat.st_mtime_ns
