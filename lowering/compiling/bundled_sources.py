"""Bundled C sources of a model.so: the thread pool (parallel.c) and checks of data and sizes (checks.c).

A model that calls the checks of serving operators' tables gets those, too (requests_*.c).
"""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

from tvm_ffi import libinfo

from .cache import object_cache
from .cache.fingerprints import fingerprint_program

FOLDER = Path(__file__).parents[1] / "runtime" / "native"
_FLAGS = ("-O2", "-fPIC", "-pthread", "-std=gnu11")
_SOURCES = ("parallel", "checks")
_BY_FUNCTION = {
    "lowering_check_openppl": ("requests_openppl",),
    "lowering_check_served": ("requests_served",),
    "lowering_check_sources": ("requests_served",),
    "lowering_check_tensorrt_llm": ("requests_tensorrt_llm", "requests_tensorrt_llm_slots"),
}


def compile_bundled_sources(cc: str, folder: str | Path, called: Collection[str] = tuple(_BY_FUNCTION)) -> list[str]:
    """Compile the sources for calls of these functions, and return the options that link them.

    Object files go to `folder`. Raise RuntimeError if the compiler fails.
    """
    sources = (*_SOURCES, *list_sources(called))
    paths = [Path(folder) / f"{name}.o" for name in sources]
    for name, path in zip(sources, paths):
        path.write_bytes(_get_object(cc, name))
    return ["-pthread", *map(str, paths)]


def list_sources(called: Collection[str]) -> list[str]:
    """Return the names, without .c, of the sources in `FOLDER` that check requests by these functions."""
    return list(dict.fromkeys(name for function, names in _BY_FUNCTION.items() if function in called for name in names))


@functools.cache
def _get_object(cc: str, name: str) -> bytes:
    """Return a compiled source: once per process, and cached, as it takes longer than compiling a small model."""
    key = "c" + hashlib.sha256(repr((fingerprint_program(cc), _FLAGS, name, _hash_sources())).encode()).hexdigest()[:32]
    code = object_cache.get(key, object_cache.CARRIED)
    if code is None:
        code = _compile_source(cc, name)
        object_cache.put(key, code, object_cache.CARRIED)
    return code


def _compile_source(cc: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.o"
        files = ["-c", "-x", "c", str(FOLDER / f"{name}.c"), "-o", str(path)]
        command = [cc, *_FLAGS, "-I", libinfo.find_include_path(), *files]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return path.read_bytes()


@functools.cache
def _hash_sources() -> str:
    """Return the digest of the sources, with their includes."""
    digest = hashlib.sha256(version("apache-tvm-ffi").encode())
    for path in sorted((*FOLDER.glob("*.c"), *FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
