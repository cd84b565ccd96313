"""Random mods against the same functions in NumPy: hundreds of calls, thousands on request (-m slow)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from flex_reference import blocks_of, called, grid, naive, truth, visible
from random_mods import NEAR, Drawn

from lowering import flex

CALLS = [(2, 1, 1), (1, 1, 77), (2, 7, 60), (1, 64, 64), (3, 33, 20), (1, 130, 65), (2, 5, 0), (0, 3, 3), (1, 2, 40)]
CALLS += [(4, 12, 12), (1, 16, 129), (2, 40, 1), (1, 0, 9), (3, 8, 24)]
HEADS = [(1, 1), (2, 1), (4, 2), (6, 2)]
TYPES = ["float32", "float32", "float32", "float64", "float16", "bfloat16"]
ROUNDING = {"float32": 2e-5, "float64": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Of results of size 1, with room for mods that enlarge errors (float64: mods make float32 of integers)."""


def check(seed: int) -> None:
    """A random mod, one kernel and calls of several lengths; of a mask the blocks, too."""
    drawn, rng = Drawn(seed), np.random.default_rng(seed)
    dtype, (heads, kv_heads) = str(rng.choice(TYPES)), HEADS[rng.integers(len(HEADS))]
    d, blocked = int(rng.choice([4, 16, 24])), rng.random() < 0.3
    mods = drawn.mods()
    for batch, rows, keys in CALLS:
        captures = drawn.captures({"b": batch, "h": heads, "i": rows, "j": keys}, rng)
        q, k, v = (
            rng.standard_normal((batch, n, length, d)).astype(dtype)
            for n, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        )
        given, block_mask = dict(mods), None
        if blocked and mods["mask_mod"] is not None:
            own = flex.mod.ModSignature(mods["mask_mod"]).bindings(captures)
            block_mask = flex.create_block_mask(mods["mask_mod"], batch, heads, rows, keys, (16, 24), own)
            given["mask_mod"] = None
        left = captures if block_mask is None else {n: x for n, x in captures.items() if n not in block_mask.captures}
        y, lse = flex.flex_attention(
            q, k, v, **given, block_mask=block_mask, enable_gqa=True, return_lse=True, captures=left
        )
        compare(drawn, (q, k, v), captures, y, lse)
        if block_mask is not None and not _doubtful(drawn, (batch, heads, rows, keys), captures, None).any():
            dense = visible(mods["mask_mod"], (batch, heads, rows, keys), captures)
            np.testing.assert_array_equal(block_mask.states, blocks_of(dense, (16, 24)))


def compare(drawn: Drawn, operands: Any, captures: dict[str, np.ndarray], y: np.ndarray, lse: np.ndarray) -> None:
    """Rows in which no comparison hangs on rounding are those of the truth."""
    q, k, v = operands
    expected, plain = (f(q, k, v, **drawn.mods(), captures=captures) for f in (truth, naive))
    scores = (q.astype(float) @ np.repeat(k, q.shape[1] // k.shape[1], 1).astype(float).swapaxes(2, 3)) / np.sqrt(
        q.shape[3]
    )
    sure = ~_doubtful(drawn, scores.shape, captures, scores)
    if not sure.any():
        return
    for found, wanted, given in zip((y, lse), expected, plain):
        shown = np.isfinite(wanted) & (sure[..., None] if wanted.ndim == 4 else sure)
        assert (np.isneginf(found) == np.isneginf(wanted))[sure].all()
        size = max(1.0, float(np.abs(wanted[shown]).max(initial=0)))
        allowed = ROUNDING[y.dtype.name] * size + 30 * float(np.abs(given[shown] - wanted[shown]).max(initial=0))
        error = np.abs(found[shown] - wanted[shown])
        assert np.isfinite(found[shown]).all() and (error <= allowed).all(), (error.max(), allowed)


def _doubtful(drawn: Drawn, shape: Any, captures: dict[str, np.ndarray], scores: np.ndarray | None) -> np.ndarray:
    """bool [B, H, S]: whether floating-point numbers that a mod compares in the row are nearly equal."""
    found = np.zeros(shape[:3], bool)

    def less(a: Any, b: Any) -> Any:
        near = np.abs(a - b) <= NEAR * (np.abs(a) + np.abs(b))
        found[...] |= np.broadcast_to(near, shape).any(3)
        return a < b

    mods = drawn.mods(less)
    if mods["mask_mod"] is not None:
        called(mods["mask_mod"], grid(shape), captures)
    if mods["score_mod"] is not None and scores is not None:
        called(mods["score_mod"], [scores, *grid(shape)], captures)
    return found


@pytest.mark.parametrize("seed", range(1, 11))
def test_random_mods(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + int(os.environ.get("RANDOM_MODS", "600"))))
def test_many_random_mods(seed: int) -> None:
    check(seed)
