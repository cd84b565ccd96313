"""Reading memory: data for a kernel that does nothing else, and whether it has read all of it.

The kernel folds words by exclusive or, one result for each warp; kv_len of the sizes is the number of chunks of 16
bytes.
"""

from __future__ import annotations

from typing import Any

from ..plan import Sizes
from .memory import Array, Memory

Arrays = dict[str, Array]

WORDS = 4
"""Of a chunk."""


def draw(problem: Any, sizes: Sizes, memory: Memory, *, poison: bool) -> Arrays:
    """Fresh data, int32 [chunks, WORDS], and the results, all bits set."""
    data = memory.words((sizes.kv_len, WORDS))
    return {"data": data, "found": memory.full((problem.warps,), -1, "int32")}


def expected(problem: Any, arrays: Arrays, memory: Memory) -> Array:
    """The exclusive or of all words."""
    return _folded(arrays["data"].reshape(-1))


def error(found: Array, right: Array, memory: Memory) -> float:
    """0 where the results fold to what is expected, else infinite."""
    return 0.0 if int(_folded(found.reshape(-1))) == int(right) else float("inf")


def _folded(words: Array) -> Array:
    while len(words) > 1:
        half = len(words) // 2
        rest = words[2 * half :]
        words = words[:half] ^ words[half : 2 * half]
        if len(rest):
            words[0] = words[0] ^ rest[0]
    return words[0]
