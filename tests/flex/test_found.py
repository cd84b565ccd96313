"""Failures that random mods found, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowering import flex
from tests.flex.flex_reference import assert_close, compute_naive, compute_reference

RNG = np.random.default_rng(0)


def check(score: Callable[..., Any] | None, mask: Callable[..., Any] | None, **captures: np.ndarray) -> None:
    """Check one row, few rows and many: other kernels serve them."""
    for rows, keys in ((1, 40), (3, 40), (40, 40)):
        q = RNG.standard_normal((1, 4, rows, 16)).astype("f")
        k, v = (RNG.standard_normal((1, 2, keys, 16)).astype("f") for _ in range(2))
        arguments: Any = (score, mask, captures)
        y = flex.flex_attention(q, k, v, score, mask, enable_gqa=True, captures=captures)
        assert_close(y, compute_reference(q, k, v, *arguments)[0], compute_naive(q, k, v, *arguments)[0])


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, i, j, *, flag: flag[i] ^ flag[j],
        lambda b, h, i, j, *, flag: flag[i] == flag[j],
        lambda b, h, i, j, *, flag: flag[i] != (i > j),
        lambda b, h, i, j, *, flag: (flag[i] < flag[j]) | (flag[i] >= (h == 1)),
    ],
)
def test_truth_values_that_are_compared(mask: Callable[..., Any]) -> None:
    """TVM compares no vectors of truth values."""
    check(None, mask, flag=RNG.random(40) < 0.5)


def test_numbers_of_numpy_before_an_operator() -> None:
    """NumPy hands them on as arrays without dimensions."""
    half = np.float64(0.5)
    check(lambda s, b, h, i, j: flex.where(half < s, half * s, half - s) + np.int64(2) * s, None)


def test_functions_of_numbers_alone() -> None:
    """They give numbers, and no arrays without dimensions."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * flex.where(True, 2, 3) + flex.cast(3, "int64") + flex.maximum(1, 2) - flex.exp(flex.tan(0.0))

    check(mod, None)


def test_reads_in_reads_at_vectors_of_heads_and_rows() -> None:
    """Each was once emitted for every lane, with all that its indices read."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, *, x: Any, at: Any) -> Any:
        return s + x[at[h, at[h, at[h, at[h, i]]]], at[at[i, h], j]]

    check(mod, None, x=RNG.standard_normal((40, 40)).astype("f"), at=RNG.integers(-40, 40, (40, 40)).astype("i2"))


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, i, j: s * (6 + j),
        lambda s, b, h, i, j: s * (1 - i) * 0.1,
        lambda s, b, h, i, j: s - abs(s * flex.cast(6 + h, "float32")),
        lambda s, b, h, i, j: (i - j) * (s + (2 * i + 1)) / 16,
    ],
)
def test_matmuls_of_scores_and_integers(mod: Callable[..., Any]) -> None:
    """TVM's analysis of sets of integers stumbles over such a matmul of floats."""
    check(mod, None)


def test_quotients_of_quotients() -> None:
    """TVM's lowering of a division repeats what is divided."""

    def mask(b: Any, h: Any, i: Any, j: Any, *, at: Any) -> Any:
        return ((at[i] % flex.where(at[j] == 0, 3, at[j])) // 16 % 5 // (at[j] * at[j] + 1) + i // 3) % 2 == 0

    check(None, mask, at=RNG.integers(-40, 40, 40).astype("i4"))


@pytest.mark.parametrize("rows", [3, 7, 20])
def test_remainders_of_few_positions_need_no_larger_array(rows: int) -> None:
    """i % 7 is at most i."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, *, x: Any) -> Any:
        return s + x[i % 7] * (j + 1)

    q = RNG.standard_normal((1, 1, rows, 8)).astype("f")
    arguments: Any = (mod, None, {"x": RNG.standard_normal(min(rows, 7)).astype("f")})
    y = flex.flex_attention(q, q, q, mod, captures=arguments[2])
    assert_close(y, compute_reference(q, q, q, *arguments)[0], compute_naive(q, q, q, *arguments)[0])
