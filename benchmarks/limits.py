"""The limits of the machine: matmuls of the best library, and reading memory once.

Each limit is measured by several contenders, which take turns with those of a case; the fastest one counts.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np

from .cases.case import Work
from .peers import ONE_THREAD, Contender, Form

_SIZE = 2048
_STREAMS = (1, 2, 4, 8, 16)
VECTOR = 64  # bytes


def limits(work: Work, threads: int) -> tuple[dict[str, Form], float]:
    """Return contenders by name, and how much of the work's unit one call of each does.

    FLOPs: float32 matmuls of 2048^3 by PyTorch (MKL) and NumPy (OpenBLAS). Bytes: a streaming read of as many
    bytes as the work has. Work of zero is unlimited. Where there are several threads, those that can also run on
    one do, which shows how the limit itself scales.
    """
    if not work.amount:
        return {}, 0.0
    if work.unit == "FLOP":
        return _matmuls(threads), 2.0 * _SIZE**3
    count = int(work.amount) // threads // VECTOR * threads
    forms = _reads(count, threads)
    if threads > 1:
        forms |= {f"{name}{ONE_THREAD}": form for name, form in _reads(count, 1).items()}
    return forms, float(count * VECTOR)


def _form(call: Callable[[], object], threads: int) -> Form:
    return Form(lambda: Contender(call, lambda _: {}), threads)


def _matmuls(threads: int) -> dict[str, Form]:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((_SIZE, _SIZE), np.float32) for _ in range(2))
    out = np.empty((_SIZE, _SIZE), np.float32)
    # NumPy's library takes its number of threads from the environment, which `python -m benchmarks` sets.
    forms = {"numpy matmul": _form(lambda: np.matmul(a, b, out), threads)}
    try:
        import torch
    except ImportError:
        return forms
    x, y, z = (torch.from_numpy(array) for array in (a, b, out))

    def matmul(count: int) -> None:
        torch.set_num_threads(count)
        torch.mm(x, y, out=z)

    forms["torch.mm"] = _form(partial(matmul, threads), threads)
    if threads > 1:
        forms[f"torch.mm{ONE_THREAD}"] = _form(partial(matmul, 1), 1)
    return forms


def _reads(count: int, threads: int) -> dict[str, Form]:
    """Read `count` vectors, divided among the threads."""
    share = count // threads
    memory = np.full((count + 1) * VECTOR // 4, 1.0, np.float32)
    start = -(-memory.ctypes.data // VECTOR) * VECTOR
    pool = ThreadPoolExecutor(threads)

    def reader(read: Callable[[int, int], float]) -> Callable[[], object]:
        if threads == 1:
            return lambda: (memory, read(start, count))
        starts = [start + k * share * VECTOR for k in range(threads)]
        return lambda: (memory, list(pool.map(lambda at: read(at, share), starts)))

    return {f"read, {n} streams": _form(reader(getattr(library(), f"read_{n}")), threads) for n in _STREAMS}


@cache
def library() -> ctypes.CDLL:
    """streaming_read.c."""
    source = Path(__file__).with_name("streaming_read.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "streaming_read.so"
        subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", path, source], check=True)
        loaded = ctypes.CDLL(str(path))
    arguments = {f"read_{n}": (ctypes.c_void_p, ctypes.c_size_t) for n in _STREAMS}
    arguments["read_blocks"] = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    for name, types in arguments.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, ctypes.c_float
    return loaded
