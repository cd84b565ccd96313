"""The C code that a model.so carries: the thread pool (parallel.c), checks of data and sizes (checks.c) and, where it
calls them, of the tables of serving operators (requests_*.c)."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path

from tvm_ffi import libinfo

from . import object_cache
from .fingerprints import program

_FOLDER = Path(__file__).parents[1] / "runtime"
_FLAGS = ("-O2", "-fPIC", "-pthread", "-std=gnu11")
_SOURCES = ("parallel", "checks")
_BY_FUNCTION = {
    "lowering_check_openppl": ("requests_openppl",),
    "lowering_check_served": ("requests_served",),
    "lowering_check_sources": ("requests_served",),
    "lowering_check_tensorrt_llm": ("requests_tensorrt_llm", "requests_tensorrt_llm_slots"),
}


def link_options(cc: str, folder: str | Path, called: Collection[str] = tuple(_BY_FUNCTION)) -> list[str]:
    """Options that make the C compiler `cc` link that code into a library that calls functions of these names; object
    files go to `folder`.

    Raises RuntimeError when the compiler fails.
    """
    more = (name for function, names in _BY_FUNCTION.items() if function in called for name in names)
    sources = (*_SOURCES, *dict.fromkeys(more))
    paths = [Path(folder) / f"{name}.o" for name in sources]
    for name, path in zip(sources, paths):
        path.write_bytes(_object(cc, name))
    return ["-pthread", *map(str, paths)]


@functools.cache
def _object(cc: str, name: str) -> bytes:
    """A compiled source: once per process, and kept for others, since it takes longer than compiling a small model."""
    key = "c" + hashlib.sha256(repr((program(cc), _FLAGS, name, _sources())).encode()).hexdigest()[:32]
    found = object_cache.get(key, object_cache.CARRIED)
    if found is None:
        found = _compiled(cc, name)
        object_cache.put(key, found, object_cache.CARRIED)
    return found


def _compiled(cc: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.o"
        files = ["-c", "-x", "c", str(_FOLDER / f"{name}.c"), "-o", str(path)]
        command = [cc, *_FLAGS, "-I", libinfo.find_include_path(), *files]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return path.read_bytes()


@functools.cache
def _sources() -> str:
    """Of the code, with what it includes."""
    digest = hashlib.sha256(version("apache-tvm-ffi").encode())
    for path in sorted((*_FOLDER.glob("*.c"), *_FOLDER.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
