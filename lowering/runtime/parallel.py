"""The thread pool that every model.so carries (parallel.c)."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from pathlib import Path

from tvm_ffi import libinfo


def link_options(cc: str, folder: str | Path) -> list[str]:
    """Options that make the C compiler `cc` link the pool into a library; the object file goes to `folder`.

    Raises RuntimeError when the compiler fails.
    """
    path = Path(folder) / "parallel.o"
    path.write_bytes(_object(cc))
    return ["-pthread", str(path)]


@functools.cache
def _object(cc: str) -> bytes:
    """The compiled pool: once per process, since it takes longer than compiling a small model."""
    source = Path(__file__).with_name("parallel.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parallel.o"
        flags = ["-O2", "-fPIC", "-pthread", "-std=gnu11", "-I", libinfo.find_include_path()]
        done = subprocess.run([cc, *flags, "-c", "-x", "c", source, "-o", path], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return path.read_bytes()
