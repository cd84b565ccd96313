"""Bundled C sources of compiled models: threads and parallel loops, and checks of data and sizes.

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
_PACKED_FLAGS = ("-O2", "-fPIC", "-pthread", "-std=gnu11")
_PACKED_SOURCES = ("parallel", "pool", "checks")
C_FLAGS = (
    "-std=c11", "-O2", "-fPIC", "-ffreestanding", "-fno-stack-protector", "-fwrapv",
    "-fno-asynchronous-unwind-tables", "-Wno-unused-function", "-DLOWERING_C_CODE",
)  # fmt: skip
"""Flags of a model's C code, and of the sources that it calls."""
LIBRARY, ONE_THREAD = "-DLOWERING_LIBRARY", "-DLOWERING_ONE_THREAD"
"""Flags of C code with threads and memory of its own, and of code that one thread runs at a time."""
_BY_FUNCTION = {
    "lowering_check_openppl": ("requests_openppl",),
    "lowering_check_served": ("requests_served",),
    "lowering_check_sources": ("requests_served",),
    "lowering_check_tensorrt_llm": ("requests_tensorrt_llm", "requests_tensorrt_llm_slots"),
}


def compile_bundled_sources(cc: str, folder: str | Path, called: Collection[str] = tuple(_BY_FUNCTION)) -> list[str]:
    """Compile the sources of a model for TVM's runtime that calls these functions; return the options that link them.

    Object files go to `folder`. Raise RuntimeError if the compiler fails.
    """
    names = (*_PACKED_SOURCES, *_list_checks(called))
    return ["-pthread", *(_write_object(cc, folder, name, _PACKED_FLAGS) for name in names)]


def compile_c_sources(cc: str, folder: str | Path, called: Collection[str], variant: Collection[str]) -> list[str]:
    """Compile the sources of a model's C code that calls these checks; return the paths of their object files.

    Args:
        cc: The C compiler.
        folder: Where the object files go.
        called: Names of checks of requests.
        variant: `LIBRARY`, `ONE_THREAD` or neither.

    Raises:
        RuntimeError: The compiler fails.
    """
    names = ["tasks", *(["pool", "heap"] if LIBRARY in variant else []), *_list_checks(called)]
    return [_write_object(cc, folder, name, (*C_FLAGS, *variant)) for name in names]


def _list_checks(called: Collection[str]) -> list[str]:
    """Return the names, without .c, of the sources in `FOLDER` that check requests by these functions."""
    return list(dict.fromkeys(name for function, names in _BY_FUNCTION.items() if function in called for name in names))


def _write_object(cc: str, folder: str | Path, name: str, flags: tuple[str, ...]) -> str:
    path = Path(folder) / f"{name}.o"
    path.write_bytes(_get_object(cc, name, flags))
    return str(path)


@functools.cache
def _get_object(cc: str, name: str, flags: tuple[str, ...]) -> bytes:
    """Return a compiled source: once per process, and cached, as it takes longer than compiling a small model."""
    key = "c" + hashlib.sha256(repr((fingerprint_program(cc), flags, name, _hash_sources())).encode()).hexdigest()[:32]
    code = object_cache.get(key, object_cache.CARRIED)
    if code is None:
        code = _compile_source(cc, name, flags)
        object_cache.put(key, code, object_cache.CARRIED)
    return code


def _compile_source(cc: str, name: str, flags: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.o"
        files = ["-c", "-x", "c", str(FOLDER / f"{name}.c"), "-o", str(path)]
        command = [cc, *flags, "-I", libinfo.find_include_path(), *files]
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
