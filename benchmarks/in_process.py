"""Kernels that TVM compiles into this process, as tests and benchmarks do, find what a model.so would have for them."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

# TVM's thread pool serves these kernels, and is not told.
_CODE = "int lowering_plan_launch(long long tasks) { return (int)tasks; }"


@functools.cache
def provide() -> None:
    """Once per process. Raises RuntimeError where no C compiler is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "provided.so"
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        done = subprocess.run(command, input=_CODE, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
