"""Random mods against the same functions in NumPy: hundreds of calls, thousands on request (-m slow)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from lowering import flex
from tests.flex.flex_reference import (
    call_mod,
    compute_block_states,
    compute_naive,
    compute_reference,
    compute_visible,
    make_grid,
)
from tests.flex.random_mods import NEAR, RandomMods

CALLS = [(2, 1, 1), (1, 1, 77), (2, 7, 60), (1, 64, 64), (3, 33, 20), (1, 130, 65), (2, 5, 0), (0, 3, 3), (1, 2, 40)]
CALLS += [(4, 12, 12), (1, 16, 129), (2, 40, 1), (1, 0, 9), (3, 8, 24)]
HEADS = [(1, 1), (2, 1), (4, 2), (6, 2)]
TYPES = ["float32", "float32", "float32", "float64", "float16", "bfloat16"]
ROUNDING = {"float32": 2e-5, "float64": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Tolerance of results of size 1, for mods that enlarge errors, too (float64: mods convert integers to float32)."""


def check(seed: int) -> None:
    """Check a random mod: one kernel and calls of several lengths, and the blocks of a mask."""
    random_mods, rng = RandomMods(seed), np.random.default_rng(seed)
    dtype, (heads, kv_heads) = str(rng.choice(TYPES)), HEADS[rng.integers(len(HEADS))]
    d, blocked = int(rng.choice([4, 16, 24])), rng.random() < 0.3
    mods = random_mods.mods()
    for batch, rows, keys in CALLS:
        captures = random_mods.captures({"b": batch, "h": heads, "i": rows, "j": keys}, rng)
        q, k, v = (
            rng.standard_normal((batch, n, length, d)).astype(dtype)
            for n, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
        )
        options, block_mask = dict(mods), None
        if blocked and mods["mask_mod"] is not None:
            own = flex.mod.ModSignature(mods["mask_mod"]).bindings(captures)
            block_mask = flex.create_block_mask(mods["mask_mod"], batch, heads, rows, keys, (16, 24), own)
            options["mask_mod"] = None
        left = captures if block_mask is None else {n: x for n, x in captures.items() if n not in block_mask.captures}
        y, lse = flex.flex_attention(
            q, k, v, **options, block_mask=block_mask, enable_gqa=True, return_lse=True, captures=left
        )
        compare(random_mods, (q, k, v), captures, y, lse)
        if block_mask is not None and not _doubtful(random_mods, (batch, heads, rows, keys), captures, None).any():
            dense = compute_visible(mods["mask_mod"], (batch, heads, rows, keys), captures)
            np.testing.assert_array_equal(block_mask.states, compute_block_states(dense, (16, 24)))


def compare(
    random_mods: RandomMods, operands: Any, captures: dict[str, np.ndarray], y: np.ndarray, lse: np.ndarray
) -> None:
    """Check the rows in which no comparison depends on rounding against the float64 reference."""
    q, k, v = operands
    expected, plain = (f(q, k, v, **random_mods.mods(), captures=captures) for f in (compute_reference, compute_naive))
    scores = (q.astype(float) @ np.repeat(k, q.shape[1] // k.shape[1], 1).astype(float).swapaxes(2, 3)) / np.sqrt(
        q.shape[3]
    )
    sure = ~_doubtful(random_mods, scores.shape, captures, scores)
    if not sure.any():
        return
    for actual, reference, baseline in zip((y, lse), expected, plain):
        shown = np.isfinite(reference) & (sure[..., None] if reference.ndim == 4 else sure)
        assert (np.isneginf(actual) == np.isneginf(reference))[sure].all()
        size = max(1.0, float(np.abs(reference[shown]).max(initial=0)))
        allowed = ROUNDING[y.dtype.name] * size + 30 * float(np.abs(baseline[shown] - reference[shown]).max(initial=0))
        error = np.abs(actual[shown] - reference[shown])
        assert np.isfinite(actual[shown]).all() and (error <= allowed).all(), (error.max(), allowed)


def _doubtful(
    random_mods: RandomMods, shape: Any, captures: dict[str, np.ndarray], scores: np.ndarray | None
) -> np.ndarray:
    """Return bool [B, H, S]: whether floating-point numbers that a mod compares in the row are nearly equal."""
    doubtful = np.zeros(shape[:3], bool)

    def less(a: Any, b: Any) -> Any:
        near = np.abs(a - b) <= NEAR * (np.abs(a) + np.abs(b))
        doubtful[...] |= np.broadcast_to(near, shape).any(3)
        return a < b

    mods = random_mods.mods(less)
    if mods["mask_mod"] is not None:
        call_mod(mods["mask_mod"], make_grid(shape), captures)
    if mods["score_mod"] is not None and scores is not None:
        call_mod(mods["score_mod"], [scores, *make_grid(shape)], captures)
    return doubtful


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(1, 11))
def test_random_mods(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + int(os.environ.get("RANDOM_MODS", "600"))))
def test_many_random_mods(seed: int) -> None:
    check(seed)
