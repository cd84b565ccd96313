"""The C code that a model.so carries: the thread pool (parallel.c), checks of data and sizes (checks.c) and, where it
calls them, of the tables of serving operators (requests_*.c)."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

from tvm_ffi import libinfo

_SOURCES = ("parallel", "checks")
_BY_FUNCTION = {
    "lowering_check_openppl": ("requests_openppl",),
    "lowering_check_served": ("requests_served",),
    "lowering_check_tensorrt_llm": ("requests_tensorrt_llm", "requests_tensorrt_llm_slots"),
}


def link_options(cc: str, folder: str | Path, called: Collection[str] = tuple(_BY_FUNCTION)) -> list[str]:
    """Options that make the C compiler `cc` link that code into a library that calls functions of these names; object
    files go to `folder`.

    Raises RuntimeError when the compiler fails.
    """
    more = (name for function, names in _BY_FUNCTION.items() if function in called for name in names)
    sources = (*_SOURCES, *more)
    paths = [Path(folder) / f"{name}.o" for name in sources]
    for name, path in zip(sources, paths):
        path.write_bytes(_object(cc, name))
    return ["-pthread", *map(str, paths)]


@functools.cache
def _object(cc: str, name: str) -> bytes:
    """A compiled source: once per process, since it takes longer than compiling a small model."""
    source = Path(__file__).with_name(f"{name}.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.o"
        flags = ["-O2", "-fPIC", "-pthread", "-std=gnu11", "-I", libinfo.find_include_path()]
        done = subprocess.run([cc, *flags, "-c", "-x", "c", source, "-o", path], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return path.read_bytes()
