"""Texts of errors about block masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowering import flex
from lowering.errors import InputError
from tests.flex.errors_said import assert_says

Q = np.ones((1, 2, 5, 8), "f")
BIAS = np.ones((2, 5), "f")


def attend(**options: Any) -> Any:
    return flex.flex_attention(Q, Q, Q, **options)


def causal(b, h, i, j):
    return i >= j


def masked(b, h, i, j, *, bias):
    return bias[h, i] > 0


def lists(
    counts: Any, indices: Any, full_counts: Any = None, full_indices: Any = None, **options: Any
) -> flex.BlockMask:
    arrays = [None if x is None else np.asarray(x, np.int32) for x in (counts, indices, full_counts, full_indices)]
    return flex.BlockMask.from_kv_blocks(*arrays, **options)


BLOCK_MASKS: dict[str, tuple[Callable[[], Any], str]] = {
    "BLOCK_SIZE 0": (lambda: flex.create_block_mask(causal, 1, 1, 5, 5, 0), r"BLOCK_SIZE is 0. Give the rows and keys"),
    "negative BLOCK_SIZE": (lambda: flex.create_block_mask(causal, 1, 1, 5, 5, (4, -1)), r"BLOCK_SIZE is \(4, -1\)"),
    "three sizes": (lambda: flex.create_block_mask(causal, 1, 1, 5, 5, (4, 4, 4)), r"BLOCK_SIZE is \(4, 4, 4\)"),
    "a float as size": (lambda: flex.create_block_mask(causal, 1, 1, 5, 5, 2.5), r"BLOCK_SIZE is 2.5"),
    "negative length": (lambda: flex.create_block_mask(causal, 1, 1, -5, 5), r"Q_LEN is -5. Give a number from 0"),
    "no length": (lambda: flex.create_block_mask(causal, 1, 1, 5, None), r"KV_LEN is None. Give a number"),
    "a large batch": (lambda: flex.create_block_mask(causal, 2**40, 1, 5, 5), r"B is \d+. Give a number"),
    "a score_mod": (lambda: flex.create_block_mask(flex.mods.noop, 1, 1, 5, 5), r"mask_mod `noop`.* takes 5 arguments"),
    "a capture too small": (
        lambda: flex.create_block_mask(masked, 1, 2, 9, 5, captures={"bias": BIAS}),
        r"^the captured array 'bias' is read from 0 to 8 along dimension 1, which has size 5\.$",
    ),
    "a missing list": (lambda: lists([[[1]]], [[[[0]]]], [[[0]]]), r"belong together. Give both or neither"),
    "a rank": (
        lambda: lists([[1]], [[[[0]]]]),
        r"kv_num_blocks is int32 of rank 2. Make it int32 \[B, H, row blocks\]",
    ),
    "floats": (
        lambda: flex.BlockMask.from_kv_blocks(np.ones((1, 1, 1)), np.ones((1, 1, 1, 1), np.int32)),
        r"kv_num_blocks is float64 of rank 3",
    ),
    "shapes": (lambda: lists([[[1, 1]]], [[[[0]]]]), r"kv_num_blocks has the shape \[1, 1, 2\], and kv_indices has"),
    "too many": (lambda: lists([[[2]]], [[[[0]]]]), r"kv_num_blocks\[0, 0, 0\] is 2, but must be 0 to 1"),
    "fewer than none": (lambda: lists([[[-1]]], [[[[0]]]]), r"kv_num_blocks\[0, 0, 0\] is -1, but must be 0 to 1"),
    "a block outside": (lambda: lists([[[1]]], [[[[7]]]]), r"kv_indices\[0, 0, 0, 0\] is 7, but must be 0 to 0"),
    "a block twice": (lambda: lists([[[2]]], [[[[1, 1]]]]), r"block 1 of row block 0 .* is listed twice"),
    "partial and full": (lambda: lists([[[1]]], [[[[1, 0]]]], [[[1]]], [[[[1, 0]]]]), r"block 1 .* is listed twice"),
    "lengths": (
        lambda: lists([[[1]]], [[[[0]]]], seq_lengths=(200, 5)),
        r"200 rows are 2 blocks of 128, and the lists have 1",
    ),
    "negative lengths": (lambda: lists([[[1]]], [[[[0]]]], seq_lengths=(-3, 5)), r"seq_lengths is \(-3, 5\)"),
    "other rows": (
        lambda: attend(block_mask=flex.create_block_mask(causal, None, None, 4, 5)),
        r"block_mask is for 4 rows and 5 keys, but there are 5 and 5. Create a new one",
    ),
    "fewer rows": (
        lambda: attend(block_mask=flex.create_block_mask(causal, None, None, 7, 5)),
        r"Use block_mask.adjust\(5, 5\)",
    ),
    "other batches": (
        lambda: attend(block_mask=flex.create_block_mask(causal, 3, None, 5, 5)),
        r"block_mask is for 3 batches, but q has 1. Create it for 1 or 1 batches",
    ),
    "other heads": (
        lambda: attend(block_mask=flex.create_block_mask(causal, None, 3, 5, 5)),
        r"block_mask is for 3 heads, but q has 2. Create it for 1 or 2 heads",
    ),
    "no block mask": (lambda: attend(block_mask=np.ones((5, 5))), r"block_mask is a ndarray.*create_block_mask"),
    "larger": (
        lambda: flex.create_block_mask(causal, 1, 1, 5, 5).adjust(6, 5),
        r"for 5 rows, and cannot be adjusted to 6",
    ),
    "a third index": (lambda: flex.create_block_mask(causal, 1, 1, 5, 5)[0, 0, 0], r"indexed by batch and head only"),
}


@pytest.mark.parametrize("case", BLOCK_MASKS)
def test_block_masks_that_do_not_fit(case: str) -> None:
    make, pattern = BLOCK_MASKS[case]
    with pytest.raises(InputError) as error:
        make()
    assert_says(error.value, pattern)
