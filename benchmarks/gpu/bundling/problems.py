"""Problems of the kernels that are measured, and how much work a call of them is."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowering.attention.record.problem import AttentionProblem

from ..plan import TOLERANCE, Case, Kernel, Sizes, Tiles
from .matmuls import Matmul

TYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
GQA = {"q_heads": 32, "kv_heads": 8}

SHORT = 512
"""The largest depth of a matmul whose stores take as long as its multiplications."""

DECODE_CHECKS = ((1, 1, 77), (3, 1, 1031), (2, 2, 333), (1, 1, 9000))
"""Batch, rows and keys: small and odd, and blocks that work through several tiles."""

Parts = tuple[list[Kernel], list[Case]]


def attention_problem(dtype: str, dim: int, **changes: Any) -> AttentionProblem:
    """16 heads; batch and lengths are symbolic."""
    kind = TYPES[dtype]
    values: dict[str, Any] = {"q_heads": 16, "kv_heads": 16, "v_head_dim": dim, "scale": dim**-0.5} | changes
    values |= {"batch": None, "q_len": None, "kv_len": None, "head_dim": dim}
    return AttentionProblem(**values, dtype=kind, v_dtype=kind, acc_dtype="float32")


def attention_kernel(
    name: str,
    contender: str,
    p: AttentionProblem,
    checks: tuple[tuple[int, int, int], ...],
    *,
    variant: str = "",
    tiles: Tiles | None = None,
) -> Kernel:
    """checks are batch, q_len and kv_len; lengths are drawn, 0 and more than there are among them."""
    rng, sizes = np.random.default_rng(0), []
    for batch, q_len, kv_len in checks:
        drawn = rng.permutation([kv_len - 3, 0, kv_len + 5]) if batch == 3 else rng.integers(1, kv_len, batch)
        sizes.append(Sizes(batch, q_len, kv_len, tuple(map(int, drawn)) if p.lengths else ()))
    tolerance = TOLERANCE[p.dtype]
    return Kernel(
        f"{contender} {name}", contender, "attention", p.to_json(), p.parameters(), "y", tolerance, tuple(sizes),
        variant or contender, tiles or {},
    )  # fmt: skip


def pairs(p: AttentionProblem, sizes: Sizes) -> int:
    """Return how many pairs of queries and keys window and lengths leave visible, over all query heads. Mask tensors
    hide none here: they must be read to know."""
    i, count = np.arange(sizes.q_len), 0
    for length in sizes.lengths or (sizes.kv_len,) * sizes.batch:
        end, first = np.full_like(i, min(length, sizes.kv_len)), np.zeros_like(i)
        if p.window is not None:
            at = i + (length - sizes.q_len if p.window.offset == "lengths" else 0)
            if p.window.right is not None:
                end = np.minimum(end, at + p.window.right + 1)
            if p.window.left is not None:
                first = np.maximum(first, at - p.window.left)
        count += int(np.maximum(end - first, 0).sum())
    return count * p.q_heads


def flops(p: AttentionProblem, sizes: Sizes) -> float:
    """Return the operations of both matmuls."""
    return 2.0 * (p.head_dim + p.v_head_dim) * pairs(p, sizes)


def cache_bytes(p: AttentionProblem, sizes: Sizes) -> float:
    """K and V that count, once, and Q and Y."""
    keys = sum(sizes.lengths) if sizes.lengths else sizes.batch * sizes.kv_len
    rows = sizes.batch * sizes.q_len * p.q_heads
    return 2.0 * (keys * p.kv_heads + rows) * (p.head_dim + p.v_head_dim)


def matmul_kernel(name: str, contender: str, p: Matmul, *, variant: str = "", tiles: Tiles | None = None) -> Kernel:
    """It is checked with rows for each of its kernels, fewer where matrices are large."""
    checks = (1, 16, 45, 131, 300) if p.columns * p.depth < 1 << 20 else (1, 131)
    if p.depth <= SHORT:
        checks = (*checks, 4300)  # tiles enough for all SMs
    return Kernel(
        f"{contender} {name}", contender, "matmul", p.to_json(), p.parameters, "c", TOLERANCE[p.dtype],
        tuple(Sizes(1, m, 1) for m in checks), variant or contender, tiles or {},
    )  # fmt: skip
