"""Matmuls: inputs for a kernel, and how far its answer is from float64.

C [M, N] = A [M, K] B under an epilogue, M the q_len of the sizes. The problem has the attributes of Matmul.
"""

from __future__ import annotations

from typing import Any

from ..plan import Sizes
from . import attention
from .memory import Array, Memory

Arrays = dict[str, Array]


def draw(problem: Any, sizes: Sizes, memory: Memory, *, poison: bool) -> Arrays:
    """Fresh inputs by parameter name, c full of NaN. There is nothing to poison: all of A and B is read."""
    n, k = problem.columns, problem.depth
    arrays = {"a": memory.normal((sizes.q_len, k), problem.dtype)}
    for name in problem.factors:
        drawn = memory.normal((n, k) if problem.transposed else (k, n), problem.dtype)
        arrays[name] = memory.times(drawn, k**-0.5)  # accumulators of unit size
    if problem.epilogue == "bias":
        arrays["bias"] = memory.normal((n,), problem.dtype)
    arrays["c"] = memory.full((sizes.q_len, n), float("nan"), problem.dtype)
    return arrays


def expected(problem: Any, arrays: Arrays, memory: Memory) -> Array:
    """C in float64."""
    a, xp = memory.double(arrays["a"]), memory.xp
    bs = [memory.double(arrays[name]) for name in problem.factors]
    c = a @ (bs[0].T if problem.transposed else bs[0])
    if problem.epilogue == "bias":
        return c + memory.double(arrays["bias"])
    if problem.epilogue == "gate":
        return c / (1 + xp.exp(-c)) * (a @ (bs[1].T if problem.transposed else bs[1]))
    return c


error = attention.error
