"""Captured arrays that a mod names and does not read are allowed, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowering import flex
from tests.flex.flex_reference import compute_reference
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((1, 2, 5, 8)).astype(np.float32) for _ in range(3))


def score(s, b, h, i, j, *, bias):
    return s * 0.5


def score_of_two(s, b, h, i, j, *, bias, spare):
    return s + bias[i]


def score_by_default(s, b, h, i, j, *, bias=None):
    return s * 2


def mask(b, h, i, j, *, shown):
    return i >= j


def mask_of_one(b, h, i, j, *, bias):
    return i > j - 3


MODS: dict[str, dict[str, Any]] = {
    "a score": {"score_mod": score, "captures": {"bias": np.ones((2, 5), np.float32)}},
    "a score in half precision": {"score_mod": score, "captures": {"bias": np.ones(7, ml_dtypes.bfloat16)}},
    "a number": {"score_mod": score, "captures": {"bias": 3.5}},
    "one of two": {
        "score_mod": score_of_two,
        "captures": {"bias": np.arange(5, dtype=np.float32), "spare": np.zeros((0, 3), np.int64)},
    },
    "a default": {"score_mod": score_by_default, "captures": {"bias": np.ones(2, np.float64)}},
    "a mask": {"mask_mod": mask, "captures": {"shown": np.ones((5, 5), bool)}},
    "of both": {"score_mod": score, "mask_mod": mask_of_one, "captures": {"bias": np.ones((1, 2, 3, 4), np.int8)}},
    "composed": {
        "mask_mod": flex.masks.and_masks(mask, mask_of_one),
        "captures": {"shown": np.ones(4, np.int32), "bias": np.ones(1, np.uint8)},
    },
}


@pytest.mark.parametrize("case", MODS)
def test_named_and_not_read(case: str) -> None:
    options = MODS[case]
    for _ in range(2):  # the second time the kernel is cached
        y, lse = flex.flex_attention(Q, K, V, **options, return_lse=True)
        expected, expected_lse = compute_reference(Q, K, V, **options)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)


def test_a_block_mask_keeps_what_is_not_read() -> None:
    blocks = flex.create_block_mask(mask, None, None, 5, 5, 4, captures={"shown": np.ones(3, bool)})
    y = flex.flex_attention(Q, K, V, block_mask=blocks)
    np.testing.assert_allclose(y, compute_reference(Q, K, V, None, lambda b, h, i, j: i >= j)[0], rtol=1e-5, atol=1e-6)


def test_the_gradient_by_what_is_not_read_is_zero() -> None:
    bias = np.ones((3, 4), np.float32)
    module = flex.compile_flex(Q, K, V, score, captures={"bias": bias}, backward=True)
    module(Q, K, V)
    gradients = module.backward(np.ones((1, 2, 5, 8), np.float32))
    assert gradients["d_bias"].shape == bias.shape and not gradients["d_bias"].any()
    assert np.isfinite(gradients["dq"]).all() and gradients["dv"].any()


@pytest.mark.parametrize("case", ["score_mod", "mask_mod"])
def test_what_is_named_without_a_default_must_be_there(case: str) -> None:
    mods: dict[str, Callable[..., Any]] = {"score_mod": score, "mask_mod": mask}
    with raises("flex.capture_missing"):
        flex.flex_attention(Q, K, V, **{case: mods[case]})
