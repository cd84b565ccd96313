"""The bandwidth that the machine gives to reads of a cache in pages: blocks of so many bytes, in random order."""

from __future__ import annotations

from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from .limits import VECTOR, library
from .stores import DIM, PAGE
from .timing import interleaved, timed

TOTAL = 256 << 20
"""Bytes that are read, more than any cache can store."""
ROW = 4 * DIM
BLOCKS = {
    "one after the other": TOTAL,
    "a head's part of pages of 128": 128 * ROW,
    f"a head's part of pages of {PAGE}": PAGE * ROW,
    f"the same of int8 in pages of {PAGE}": PAGE * DIM,
    "a head's row": ROW,
}


def run(threads: int, turns: int, seconds: float) -> None:
    """The third table of the command `stores`. One thread reads, however many there are."""
    memory = np.ones(TOTAL // 4 + VECTOR, np.float32)
    start = -(-memory.ctypes.data // VECTOR) * VECTOR
    rng, orders = np.random.default_rng(0), {}
    for name, size in BLOCKS.items():
        orders[name] = rng.permutation(TOTAL // size).astype(np.uint64)

    def read(name: str) -> None:
        order = orders[name]
        library().read_blocks(start, order.ctypes.data, len(order), BLOCKS[name] // VECTOR)

    timings = interleaved({name: partial(timed, partial(read, name)) for name in BLOCKS}, turns, seconds)
    first = next(iter(timings.values())).median
    table = Table("blocks", "bytes", "GB/s", "spread", "of the first", title="reads of blocks in no order, 1 thread")
    for name, t in timings.items():
        spread = f"{TOTAL / t.high * 1e-9:.1f} to {TOTAL / t.low * 1e-9:.1f}"
        rate = f"{TOTAL / t.median * 1e-9:.1f}"
        table.add_row(name, f"{BLOCKS[name]:,}", rate, spread, f"{first / t.median:.2f}x")
    Console().print(table)
