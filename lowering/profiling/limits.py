"""Limits of this machine, by kernels that need only NumPy; of a GPU, the bandwidth of memory copies.

Arithmetic: a matmul of two float32 matrices of 1024 x 1024. Reading: a float32 dot product of a vector with itself.
Both are calls of NumPy's BLAS, which reads its number of threads from the environment when it is loaded. They therefore
run in a separate process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..runtime.devices import Gpu

_SIZE = 1024
_MIN_BYTES, _MAX_BYTES = 2**20, 2**30
_COPIED_BYTES = 2**28
_SECONDS = 0.5  # for each
_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS")


@dataclass(frozen=True)
class Limits:
    """Floating-point operations and bytes per second, and the number of bytes that were read repeatedly.

    flops is None if it is unknown: then only memory limits.
    """

    flops: float | None
    bandwidth: float
    bytes: int

    def seconds(self, flops: int, size: int) -> float:
        """Return the shortest time for that much arithmetic and reading, which overlap."""
        return max(flops / self.flops if self.flops else 0.0, size / self.bandwidth)

    def __str__(self) -> str:
        size = f"{self.bytes / 2**20:.0f} MiB"
        if self.flops is None:
            return f"{self.bandwidth / 1e9:.1f} GB/s (copies of {size} in the GPU's memory)"
        return (
            f"{self.flops / 1e9:.1f} GF/s (NumPy's sgemm, 1024 x 1024), {self.bandwidth / 1e9:.1f} GB/s "
            f"(NumPy's sdot over {size})"
        )


def measure_limits(threads: int, size: int) -> Limits:
    """Measure the limits of that many threads, reading `size` bytes (1 MiB at least, 1 GiB at most)."""
    environment = {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
    size = min(max(size, _MIN_BYTES), _MAX_BYTES)
    command = [sys.executable, __file__, str(size), str(_SECONDS)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return Limits(**json.loads(done.stdout), bytes=size)


def measure_gpu_limits(gpu: Gpu) -> Limits:
    """Measure a GPU's copy bandwidth, over more bytes than fit its caches."""
    return Limits(None, gpu.copy_bandwidth(_COPIED_BYTES), _COPIED_BYTES)


def _measure_blas(size: int, seconds: float) -> dict[str, float]:
    a, b = (np.ones((_SIZE, _SIZE), np.float32) for _ in range(2))
    out = np.empty_like(a)
    x = np.ones(size // 4, np.float32)
    return {
        "flops": 2 * _SIZE**3 / _fastest(lambda: np.matmul(a, b, out=out), seconds),
        "bandwidth": x.nbytes / _fastest(lambda: np.dot(x, x), seconds),
    }


def _fastest(run: Callable[[], object], seconds: float) -> float:
    run()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(_measure_blas(int(sys.argv[1]), float(sys.argv[2]))))
