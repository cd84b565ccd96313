"""Attention: inputs for a kernel, and how far its answer is from float64, for arrays in either kind of memory.

Axes bhtd. The problem has the attributes of AttentionProblem.
"""

from __future__ import annotations

from typing import Any

from ..plan import Sizes
from .memory import Array, Memory

Arrays = dict[str, Array]

ROWS = 1024  # of queries whose scores exist at once
_HIDDEN = 0.2  # of the pairs under a mask
_TINY = 1e-30  # below every norm of a row that sees keys


def draw(problem: Any, sizes: Sizes, memory: Memory, *, poison: bool) -> Arrays:
    """Fresh inputs by parameter name, and y full of NaN. With poison, keys and values that no query sees are NaN."""
    B, S, T = sizes.batch, sizes.q_len, sizes.kv_len
    arrays = {
        "q": memory.normal((B, problem.q_heads, S, problem.head_dim), problem.dtype),
        "k": memory.normal((B, problem.kv_heads, T, problem.head_dim), problem.dtype),
        "v": memory.normal((B, problem.kv_heads, T, problem.v_head_dim), problem.v_dtype),
        "y": memory.full((B, problem.q_heads, S, problem.v_head_dim), float("nan"), problem.dtype),
    }
    if problem.mask is not None:
        full = (B, problem.q_heads, S, T)
        shape = [n if d is None else d for n, d in zip(full, problem.mask.dims)]
        shown = memory.uniform(shape) >= _HIDDEN
        shown[..., 1::7] = False  # keys that nobody sees
        if problem.mask.dtype != "bool":
            hidden = memory.full(shape, float("-inf"), problem.mask.dtype)
            shown = memory.xp.where(shown, memory.normal(shape, problem.mask.dtype), hidden)
        arrays["mask"] = shown
    if problem.lengths:
        arrays["lengths"] = memory.integers(sizes.lengths)
    if poison:
        for b in range(B):
            for hk in range(problem.kv_heads):
                shown = _seen_by(problem, arrays, memory, b, hk)
                arrays["k"][b, hk][~shown] = float("nan")
                arrays["v"][b, hk][~shown] = float("nan")
    return arrays


def expected(problem: Any, arrays: Arrays, memory: Memory) -> Array:
    """Y in float64, [B, Hq, S, Dv]; rows that see no key are 0."""
    xp, y = memory.xp, memory.full(arrays["y"].shape, 0.0, "float64")
    group = problem.q_heads // problem.kv_heads
    for b in range(y.shape[0]):
        for hk in range(problem.kv_heads):
            k, v = (memory.double(arrays[name][b, hk]) for name in "kv")
            for h in range(hk * group, (hk + 1) * group):
                for start in range(0, y.shape[2], ROWS):
                    rows = slice(start, min(start + ROWS, y.shape[2]))
                    seen, bias = visible(problem, arrays, memory, b, h, rows)
                    s = memory.double(arrays["q"][b, h, rows]) @ k.T * problem.scale
                    if problem.softcap:
                        s = xp.tanh(s / problem.softcap) * problem.softcap
                    s = xp.where(seen, s if bias is None else s + bias, -float("inf"))
                    m = xp.amax(s, axis=-1, keepdims=True)
                    p = xp.exp(s - xp.where(m == -float("inf"), 0.0, m))
                    l = p.sum(axis=-1, keepdims=True)
                    values = xp.where(seen.any(axis=0)[:, None], v, 0.0)  # 0 * NaN = NaN
                    y[b, h, rows] = p @ values / xp.where(l == 0, 1.0, l)
    return y


def visible(problem: Any, arrays: Arrays, memory: Memory, b: int, h: int, rows: slice) -> tuple[Array, Array | None]:
    """Whether each of those rows sees each key, and what is added to its score."""
    keys = arrays["k"].shape[2]
    i, j = memory.arange(rows.start, rows.stop)[:, None], memory.arange(0, keys)[None, :]
    seen, bias, offset = (i >= 0) & (j >= 0), None, 0
    if problem.lengths:
        length = int(arrays["lengths"][b])
        seen = seen & (j < length)
        if problem.window is not None and problem.window.offset == "lengths":
            offset = length - arrays["q"].shape[2]
    if problem.window is not None and problem.window.right is not None:
        seen = seen & (j <= i + offset + problem.window.right)
    if problem.window is not None and problem.window.left is not None:
        seen = seen & (j >= i + offset - problem.window.left)
    if problem.mask is not None:
        mask = arrays["mask"]
        mask_rows = mask[b % mask.shape[0], h % mask.shape[1], rows]
        if problem.mask.dtype == "bool":
            seen = seen & mask_rows
        else:
            bias = memory.double(mask_rows)
            seen = seen & (bias > -float("inf"))
    return seen, bias


def _seen_by(problem: Any, arrays: Arrays, memory: Memory, b: int, hk: int) -> Array:
    """Return whether any row of any head of the group sees each key."""
    group, rows = problem.q_heads // problem.kv_heads, slice(0, arrays["q"].shape[2])
    heads = range(hk * group, (hk + 1) * group)
    seen_by_head = [visible(problem, arrays, memory, b, h, rows)[0].any(axis=0) for h in heads]
    return sum(seen_by_head[1:], seen_by_head[0])


def error(y: Array, right: Array, memory: Memory) -> float:
    """The norm of a row's difference relative to that of the row, in the worst row.

    One wrong row shows as well as many. Huge where y is not 0 in a row that sees no key, infinite where it is not
    finite.
    """
    difference = ((memory.double(y) - right) ** 2).sum(axis=-1) ** 0.5
    worst = float((difference / ((right**2).sum(axis=-1) ** 0.5 + _TINY)).max())
    return worst if worst < float("inf") else float("inf")
