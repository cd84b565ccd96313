"""flex_attention with the mods of PyTorch's own tests: against float64, compared with a plain computation."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy type name)
import numpy as np
import pytest

from lowering import flex
from tests.flex.flex_reference import (
    assert_close,
    compute_block_states,
    compute_naive,
    compute_reference,
    compute_visible,
)
from tests.flex.mod_cases import COMBINATIONS, MASKS, SCORES, Case

LENGTHS = [(1, 1), (1, 77), (7, 131), (64, 64), (130, 257), (257, 130)]
HEADS = [(1, 1), (4, 1), (8, 2), (6, 2)]
BLOCKS = [None, 128, (64, 128), 256, (48, 80)]
TYPES = ["float32", "bfloat16", "float16", "float64"]
WIDTHS = [(16, 16), (64, 64), (24, 8), (5, 33)]
CASES = (*SCORES, *MASKS, *COMBINATIONS)


@dataclass(frozen=True)
class Setting:
    dtype: str
    heads: tuple[int, int]
    blocks: int | tuple[int, int] | None
    widths: tuple[int, int]


def make_setting(number: int) -> Setting:
    """Return another setting for each number, so that every choice meets many cases."""
    sizes = (BLOCKS[number % 5], HEADS[number // 2 % 4], TYPES[number % 4], WIDTHS[number // 3 % 4])
    return Setting(sizes[2], sizes[1], sizes[0], sizes[3])


def check_call(
    case: Case, setting: Setting, lengths: tuple[int, int], rng: np.random.Generator, batch: int = 2, kv_batch: int = 2
) -> None:
    """Check a call whose unseen keys and values are corrupted."""
    (heads, kv_heads), (rows, keys), (d, dv) = setting.heads, lengths, setting.widths
    shape = batch, heads, rows, keys
    q, k, v = (
        rng.standard_normal(dims).astype(setting.dtype)
        for dims in ((batch, heads, rows, d), (kv_batch, kv_heads, keys, d), (kv_batch, kv_heads, keys, dv))
    )
    captures = case.captures(rng, shape)
    seen = compute_visible(case.mask, shape, captures).any(2)  # by some row
    unseen = ~seen.reshape(batch, kv_heads, -1, keys).any(2)
    unseen = unseen.all(0, keepdims=True) if kv_batch == 1 else unseen
    k[unseen], v[unseen] = np.nan, np.inf
    block_mask, mask = None, case.mask
    if setting.blocks is not None and case.mask is not None:
        own = flex.mod.ModSignature(case.mask).bindings(captures)
        block_mask = flex.create_block_mask(case.mask, batch, heads, rows, keys, setting.blocks, own)
        dense = compute_visible(case.mask, shape, own)
        np.testing.assert_array_equal(block_mask.states, compute_block_states(dense, block_mask.BLOCK_SIZE))
        captures_left = {name: array for name, array in captures.items() if name not in own}
        mask = None
    else:
        captures_left = captures
    y, lse = flex.flex_attention(
        q, k, v, case.score, mask, block_mask, enable_gqa=heads != kv_heads, return_lse=True, captures=captures_left
    )
    arguments: Any = (case.score, case.mask, captures)
    expected, plain = compute_reference(q, k, v, *arguments), compute_naive(q, k, v, *arguments)
    assert y.dtype == q.dtype and lse.dtype == np.dtype("float64" if setting.dtype == "float64" else "float32")
    single = case.single and setting.dtype == "float64"
    assert_close(y, expected[0], plain[0], single=single)
    assert_close(lse, expected[1], plain[1], "lse", 10, single)
    hidden = ~compute_visible(case.mask, shape, captures).any(3)
    assert (y[hidden] == 0).all() and np.isneginf(lse[hidden]).all()


@pytest.mark.sampled(14)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_mods(number: int) -> None:
    """Every mod with one of each choice, at all lengths."""
    for lengths in LENGTHS:
        check_call(CASES[number], make_setting(number), lengths, np.random.default_rng(number))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["relative_table", "documents_by_batch", "all_dims"])
def test_one_batch_of_keys_for_all(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    for heads, blocks in (((4, 2), None), ((6, 2), (48, 80))):
        for lengths in LENGTHS:
            setting = Setting("float32", heads, blocks, (16, 24))
            check_call(case, setting, lengths, np.random.default_rng(7), batch=3, kv_batch=1)


@pytest.mark.parametrize("name", ["njt", "by_head", "noop"])
def test_one_thread_and_two_give_the_same(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    rng, cpus = np.random.default_rng(3), os.sched_getaffinity(0)
    q, k, v = (rng.standard_normal((2, 4, 130, 16)).astype("f") for _ in range(3))
    captures = case.captures(rng, (2, 4, 130, 130))
    results = []
    try:
        for count in (1, 2):
            os.sched_setaffinity(0, set(sorted(cpus)[:count]))
            results.append(flex.flex_attention(q, k, v, case.score, case.mask, captures=captures))
    finally:
        os.sched_setaffinity(0, cpus)
    np.testing.assert_array_equal(*results)


def test_no_number_in_a_visible_row_stays_in_that_row() -> None:
    """NaN in a row of q, and infinities in keys that only some rows see."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 2, 70, 16)).astype("f") for _ in range(3))
    expected = flex.flex_attention(q, k, v, mask_mod=flex.masks.causal)
    q[:, :, 9], k[:, :, 50], v[:, :, 60] = np.nan, np.inf, np.nan
    y = flex.flex_attention(q, k, v, mask_mod=flex.masks.causal)
    assert np.isnan(y[:, :, 9]).all() and np.isnan(y[:, :, 60:]).all()
    other_rows = [i for i in range(50) if i != 9]
    np.testing.assert_array_equal(y[:, :, other_rows], expected[:, :, other_rows])


def test_a_score_that_is_no_number_counts_only_where_it_is_visible() -> None:
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 2, 40, 16)).astype("f") for _ in range(3))

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + flex.log(flex.cast(i - j + 1, "float32"))  # of a negative number after the diagonal

    arguments: Any = (mod, flex.masks.causal)
    y = flex.flex_attention(q, k, v, *arguments)
    assert_close(y, compute_reference(q, k, v, *arguments)[0], compute_naive(q, k, v, *arguments)[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_mods_with_all_choices(number: int) -> None:
    for dtype, heads, blocks, widths in itertools.product(TYPES, HEADS, BLOCKS, WIDTHS[:2]):
        for lengths in LENGTHS:
            check_call(CASES[number], Setting(dtype, heads, blocks, widths), lengths, np.random.default_rng(number))
