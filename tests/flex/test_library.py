"""The library of masks and mods: each equals its oracle for every pair, and attention with it equals a float64
reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowering import InputError, flex
from lowering.flex import masks, mods
from lowering.flex.fingerprint import fingerprint
from tests.flex.library_cases import (
    BATCHES,
    HEADS,
    KEYS,
    KV_HEADS,
    LATENT,
    MASKS,
    ROWS,
    SCORES,
    SIZE,
    T5,
    Case,
    add_t5_bias,
    t5_bucket,
)

RNG = np.random.default_rng(0)
BLOCK = (3, 5)


def visible(case: Case) -> np.ndarray:
    """Return which keys each row sees: bool [B, H, rows, keys]."""
    shape = (BATCHES, HEADS, case.rows, case.keys)
    return np.array([case.shown(*at) for at in np.ndindex(shape)], bool).reshape(shape)


def operands(rows: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((BATCHES, HEADS, rows, SIZE), (BATCHES, KV_HEADS, keys, SIZE), (BATCHES, KV_HEADS, keys, 3))
    return tuple(RNG.standard_normal(shape).astype(np.float32) for shape in shapes)  # type: ignore[return-value]


def attention(scores: np.ndarray, v: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Return y in float64; 0 for rows that see nothing."""
    scores = np.where(shown, scores, -np.inf)
    p = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e300))
    return (p / np.maximum(p.sum(-1, keepdims=True), 1e-300)) @ np.repeat(v.astype(np.float64), HEADS // KV_HEADS, 1)


def compute_scores(q: np.ndarray, k: np.ndarray, scale: float = SIZE**-0.5) -> np.ndarray:
    k = np.repeat(k.astype(np.float64), HEADS // KV_HEADS, 1)
    return scale * q.astype(np.float64) @ k.swapaxes(-1, -2)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_its_oracle_does(name: str) -> None:
    case = MASKS[name]
    shape, shown = (BATCHES, HEADS, case.rows, case.keys), visible(case)
    assert shown.any() and (not shown.all() or name in ("full", "neighborhood larger than the image"))
    on_grids = case.mod(*np.ogrid[tuple(map(slice, shape))], **case.captures)
    np.testing.assert_array_equal(np.broadcast_to(on_grids, shape), shown)
    compiled = flex.create_block_mask(case.mod, *shape, BLOCK_SIZE=1, captures=case.captures)
    np.testing.assert_array_equal(compiled.states == 2, shown)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "blocks"), ((name, b) for name in MASKS if hasattr(masks, name) for b in (False, True))
)
def test_attention_with_a_mask(name: str, blocks: bool) -> None:
    case = MASKS[name]
    q, k, v = operands(case.rows, case.keys)
    options: dict[str, Any] = {"mask_mod": case.mod, "captures": case.captures}
    if blocks:
        sizes = (BATCHES, HEADS, case.rows, case.keys)
        options = {"block_mask": flex.create_block_mask(case.mod, *sizes, BLOCK, case.captures)}
    y = flex.flex_attention(q, k, v, **options, enable_gqa=True)
    np.testing.assert_allclose(y, attention(compute_scores(q, k), v, visible(case)), rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SCORES)
def test_attention_with_a_score_mod(name: str) -> None:
    mod, captures, oracle = SCORES[name]
    q, k, v = operands(ROWS, KEYS)
    scores = compute_scores(q, k)
    shown = np.tril(np.ones((ROWS, KEYS), bool), 15)
    blocks = flex.create_block_mask(masks.shifted(masks.causal, 15), None, None, ROWS, KEYS, BLOCK)
    y, lse = flex.flex_attention(q, k, v, mod, block_mask=blocks, enable_gqa=True, captures=captures, return_lse=True)
    expected = np.array([oracle(float(s), *at) for at, s in np.ndenumerate(scores)]).reshape(scores.shape)
    np.testing.assert_allclose(y, attention(expected, v, shown), rtol=1e-5, atol=1e-5)
    exact = np.log(np.where(shown, np.exp(expected), 0).sum(-1))
    np.testing.assert_allclose(lse, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("buckets", "limit"), [(32, 128), (4, 3), (6, 200), (32, 9)])
def test_every_distance_has_the_bucket_of_t5(buckets: int, limit: int) -> None:
    """Exact powers among them, which a rounded logarithm can put a bucket too low."""
    numbers = np.arange(buckets, dtype=np.float64)[None]
    distances = np.arange(3 * limit)
    mod = mods.t5_buckets(buckets, limit)
    actual = mod(0.0, 0, 0, 0, -distances, bias=numbers), mod(0.0, 0, 0, 0, distances, bias=numbers)
    expected = np.array([t5_bucket(int(d), buckets // 4, buckets // 2, limit) for d in distances])
    np.testing.assert_array_equal(actual[0], expected)
    np.testing.assert_array_equal(actual[1], expected + np.where(distances > 0, buckets // 2, 0))


def test_the_default_buckets_of_t5() -> None:
    mod, numbers = mods.t5_buckets(), np.arange(32.0)[None]
    for distance, bucket in (
        (0, 0),
        (7, 7),
        (8, 8),
        (11, 8),
        (12, 9),
        (16, 10),
        (32, 12),
        (64, 14),
        (90, 14),
        (91, 15),
    ):
        assert mod(0.0, 0, 0, distance, 0, bias=numbers) == bucket


def test_latent_attention_is_attention_over_both_parts() -> None:
    """In DeepSeek-V2, queries and keys are concatenated from two parts, and the scale is that of both sizes."""
    q, k, v = operands(ROWS, KEYS)
    scale = (SIZE + 6) ** -0.5
    k_rope = np.broadcast_to(LATENT["k_rope"][:, None], (BATCHES, KV_HEADS, KEYS, 6))
    sides = np.concatenate([q, LATENT["q_rope"]], -1), np.concatenate([k, k_rope], -1)
    y = flex.flex_attention(q, k, v, mods.latent(6, scale), scale=scale, enable_gqa=True, captures=LATENT)
    shown = np.ones((ROWS, KEYS), bool)
    np.testing.assert_allclose(y, attention(compute_scores(*sides, scale), v, shown), rtol=1e-5, atol=1e-5)


# -- pages ------------------------------------------------------------------------------------------------------------

PAGE, PAGES = 4, 9
TABLE = np.array([[7, 2, 5, -1], [0, 8, 2, 3]])  # page 2 is shared
CACHED = [9, 14]


def in_pages(keys: list[np.ndarray]) -> np.ndarray:
    """Return [1, heads, PAGES * PAGE, size]: the keys of each batch in its pages, and NaN in all other pages."""
    pages = np.full((1, *keys[0].shape[:1], PAGES * PAGE, keys[0].shape[-1]), np.nan, np.float32)
    for row, array, length in zip(TABLE, keys, CACHED):
        for position in range(length):
            pages[0, :, row[position // PAGE] * PAGE + position % PAGE] = array[:, position]
    return pages


@pytest.mark.sampled(2)
@pytest.mark.parametrize("blocks", [False, True])
def test_a_cache_in_shuffled_pages_is_that_in_rows(blocks: bool) -> None:
    """Rows are the last three positions, under a causal mask and a bias by distance; unused pages contain NaN."""
    q = RNG.standard_normal((BATCHES, HEADS, 3, SIZE)).astype(np.float32)
    k, v = ([RNG.standard_normal((KV_HEADS, length, SIZE)).astype(np.float32) for length in CACHED] for _ in range(2))
    for array in (k, v):  # the second page of batch 0 is the third one of batch 1
        array[1][:, 2 * PAGE : 3 * PAGE] = array[0][:, PAGE : 2 * PAGE]
    captures = masks.pages(TABLE, CACHED, PAGE, PAGES)
    bias, offset = {"bias": T5}, {"offset": np.array(CACHED) - 3}
    mask = masks.paged(masks.shifted_by_batch(masks.causal), PAGE)
    score = mods.paged(mods.shifted_by_batch(mods.t5_buckets(16, 32)), PAGE)
    options: dict[str, Any] = {"mask_mod": mask, "captures": captures | bias | offset}
    if blocks:
        block_mask = flex.create_block_mask(mask, BATCHES, None, 3, PAGES * PAGE, (3, PAGE), captures | offset)
        np.testing.assert_array_equal(np.flatnonzero(block_mask.to_dense()[0, 0, 0]), sorted({7, 2, 5}))
        options = {"block_mask": block_mask, "captures": bias}
    y = flex.flex_attention(q, in_pages(k), in_pages(v), score, enable_gqa=True, **options)
    for b, length in enumerate(CACHED):
        scores = compute_scores(q[b : b + 1], k[b][None])
        for _, h, i, j in np.ndindex(scores.shape):
            scores[0, h, i, j] = add_t5_bias(scores[0, h, i, j], b, h, i + length - 3, j)
        shown = np.tril(np.ones((3, length), bool), length - 3)
        np.testing.assert_allclose(y[b : b + 1], attention(scores, v[b][None], shown), rtol=1e-5, atol=1e-5)


def test_new_pages_need_no_new_kernel() -> None:
    q, kv = np.zeros((BATCHES, HEADS, 1, SIZE), np.float32), np.ones((1, KV_HEADS, PAGES * PAGE, SIZE), np.float32)
    misses = []
    for lengths in ([1, 2], [9, 14]):
        options = {"captures": masks.pages(TABLE, lengths, PAGE, PAGES), "enable_gqa": True}
        y = flex.flex_attention(q, kv, kv, mask_mod=masks.paged(masks.full, PAGE), **options)
        np.testing.assert_allclose(y, 1)
        misses.append(flex.cache_info().misses)
    assert misses[0] == misses[1]


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: masks.pages([[0, 0]], [8], 4, 2), "page 0 twice"),
        (lambda: masks.pages([[0, 5]], [8], 4, 5), "page 5, but there are 5 pages"),
        (lambda: masks.pages([[0, -1]], [5], 4, 5), "too few pages"),
        (lambda: masks.pages([[0, 1]], [9], 4, 5), "too few pages"),
        (lambda: masks.pages([0, 1], [9], 4, 5), r"\[B, n\]"),
        (lambda: masks.documents([3, 4], [-1, 1]), "document 1 continues document 1"),
        (lambda: masks.documents([3, 4], [2, -1]), "document 0 continues document 2"),
        (lambda: masks.documents([3, 4], [-1]), "one prefix for each document"),
        (lambda: masks.ancestors_of([-1, 1]), "parent of node 1 is 1"),
        (lambda: masks.sliding_tile((6, 7), 2, 3), "do not divide the image"),
        (lambda: masks.neighborhood((6, 7), (3, 3, 3)), "Give one number, or 2 numbers"),
        (lambda: masks.neighborhood((6, 7), 0), "of 1 or more"),
        (lambda: mods.t5_buckets(2), "Choose 4 buckets or more"),
        (lambda: mods.t5_buckets(32, 8), "above the 8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(InputError, match=pattern):
        call()


# -- mods of mods -----------------------------------------------------------------------------------------------------


def test_mods_of_mods_pass_on_what_their_own_names_hide() -> None:
    """`padding` reads the array that `paged` reads, too; and a capture that has a default is passed on where given."""

    def every(b: Any, h: Any, i: Any, j: Any, *, step: Any = 2) -> Any:
        return j % step == 0

    grid = np.ogrid[:1, :1, :3, :12]
    captures = masks.pages([[2, 0]], [7], 4, 3)
    visible = masks.paged(masks.padding, 4)(*grid, **captures)
    np.testing.assert_array_equal(np.flatnonzero(visible[0, 0, 0]), [0, 1, 2, 8, 9, 10, 11])
    joined = masks.and_masks(masks.shifted(every, 1), masks.full)
    np.testing.assert_array_equal(np.flatnonzero(joined(*grid)[0, 0, 0]), range(0, 12, 2))
    step = {"step": np.array(5, np.int32)}
    states = flex.create_block_mask(joined, None, None, 1, 12, 1, step).states
    np.testing.assert_array_equal(np.flatnonzero(states), [0, 5, 10])


def test_and_masks_of_none_shows_all_and_or_masks_of_none_nothing() -> None:
    for mod, state in ((masks.and_masks(), 2), (masks.or_masks(), 0)):
        assert (flex.create_block_mask(mod, None, None, 4, 6, 2).states == state).all()


def test_a_mod_that_is_built_again_is_recognized() -> None:
    """Calls of one kind are found without being traced again."""

    def make_mask(window: int) -> Any:
        return masks.and_masks(masks.document(masks.sliding_window(window)), masks.neighborhood((4, 5), 3))

    assert fingerprint(make_mask(3)) == fingerprint(make_mask(3)) is not None
    assert fingerprint(make_mask(3)) != fingerprint(make_mask(4))
    assert fingerprint(masks.and_masks(masks.causal)) != fingerprint(masks.or_masks(masks.causal))
