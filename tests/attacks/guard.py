"""guard.c from Python: arrays in guarded memory, and the switch for what the runtime allocates."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

# A process that ends with this code has reported a foreign access on the report's descriptor.
FAULT = 97
# Address space for all blocks of one attack.
ARENA = 2 << 30


def build(folder: Path) -> Path:
    """Build the library to preload."""
    library = folder / "guard.so"
    source = Path(__file__).with_name("guard.c")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-pthread"], check=True)
    return library


class Guard:
    """The guard of this process, in which the library was preloaded.

    One side of each block is exact: its end or its begin. Fresh memory is filled with the byte `pattern`.
    """

    def __init__(self, at_end: bool, pattern: int, report: int) -> None:
        self._library = ctypes.CDLL(None)
        self._library.guard_new.restype = ctypes.c_void_p
        if self._library.guard_start(ctypes.c_size_t(ARENA), int(at_end), pattern, report):
            raise MemoryError("no address space for the guard's arena")

    def array(self, values: np.ndarray, label: str) -> np.ndarray:
        """Return a copy in a block of its own."""
        address = self._library.guard_new(ctypes.c_size_t(values.nbytes), label.encode())
        if not address:
            raise MemoryError("the guard's arena is full")
        memory = (ctypes.c_uint8 * values.nbytes).from_address(address)
        copy = np.ndarray(values.shape, values.dtype, memory)
        copy[...] = values
        return copy

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Place tensors of the runtime in guarded blocks."""
        self._library.guard_watch(1)
        try:
            yield
        finally:
            self._library.guard_watch(0)

    def damage(self) -> str | None:
        """Return a line about a write around a block, or None."""
        line = ctypes.create_string_buffer(160)
        return line.value.decode().strip() if self._library.guard_damage(line, len(line)) else None
