"""The C code that every model.so carries: the thread pool (parallel.c), checks of data and sizes (checks.c) and of the
tables of serving operators (requests_*.c)."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

from tvm_ffi import libinfo

_SOURCES = ("parallel", "checks", "requests_openppl", "requests_served", "requests_tensorrt_llm",
            "requests_tensorrt_llm_slots")  # fmt: skip


def link_options(cc: str, folder: str | Path) -> list[str]:
    """Options that make the C compiler `cc` link that code into a library; object files go to `folder`.

    Raises RuntimeError when the compiler fails.
    """
    paths = [Path(folder) / f"{name}.o" for name in _SOURCES]
    for name, path in zip(_SOURCES, paths):
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
