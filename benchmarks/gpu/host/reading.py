"""Reading memory: data for a kernel that does nothing else, and whether it has read all of it.

The kernel folds 32-bit words by exclusive or, one result for each warp; kv_len of the sizes is the number of chunks of
16 bytes.
"""

from __future__ import annotations

from typing import Any

from ..plan import Sizes
from .memory import Array, Memory

Arrays = dict[str, Array]

WORDS = 4
"""32-bit words of a chunk."""


def draw(problem: Any, sizes: Sizes, memory: Memory, *, poison: bool) -> Arrays:
    """Draw fresh data, int32 [chunks, WORDS], and the results, all bits set."""
    data = memory.random_int32((sizes.kv_len, WORDS))
    return {"data": data, "found": memory.full((problem.warps,), -1, "int32")}


def expected(problem: Any, arrays: Arrays, memory: Memory) -> Array:
    """Return the exclusive or of all 32-bit words."""
    return _folded(arrays["data"].reshape(-1))


def error(actual: Array, expected: Array, memory: Memory) -> float:
    """Return 0 where the results fold to the expected value, else infinite."""
    return 0.0 if int(_folded(actual.reshape(-1))) == int(expected) else float("inf")


def _folded(data: Array) -> Array:
    while len(data) > 1:
        half = len(data) // 2
        rest = data[2 * half :]
        data = data[:half] ^ data[half : 2 * half]
        if len(rest):
            data[0] = data[0] ^ rest[0]
    return data[0]
