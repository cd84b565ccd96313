"""No kernel reads outside of an array, whatever values captured arrays and block masks have.

A protected page lies after each array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lowering import flex
from tests.flex.flex_reference import (
    Table,
    assert_close,
    compute_block_states,
    compute_naive,
    compute_reference,
    make_grid,
)
from tests.support.placed_arrays import guarded, unaligned

RNG = np.random.default_rng(0)
EXTREMES = [0, 1, -1, 4, 5, -5, -6, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63)]
LENGTHS = [(1, 5), (5, 5), (5, 70), (40, 33), (70, 131)]


def direct(s, b, h, i, j, *, at, x):
    return s + x[at[i]] + x[at[j]]


def shifted(s, b, h, i, j, *, at, x):
    return s + x[at[i] + 1] - x[at[j] - 3]


def scaled(s, b, h, i, j, *, at, x):
    return s + x[at[i] * 2] + x[at[j] * -5]


def multiplied(s, b, h, i, j, *, at, x):
    return s + x[at[i] * at[j]]


def distance(s, b, h, i, j, *, at, x):
    return s + x[at[i] - at[j]]


def magnitude(s, b, h, i, j, *, at, x):
    return s + x[abs(at[i])] + x[abs(at[j] - i)] + x[-at[j]]


def divided(s, b, h, i, j, *, at, x):
    return s + x[at[i] // 3] + x[at[j] % 7] + x[at[i] // -1]


def divided_by_data(s, b, h, i, j, *, at, x):
    return s + x[at[i] // at[j]] + x[at[j] % at[i]]


def bits(s, b, h, i, j, *, at, x):
    return s + x[at[i] << 3] + x[at[j] >> 2] + x[~at[i]] + x[at[i] ^ at[j]] + x[i << at[j]]


def clipped(s, b, h, i, j, *, at, x):
    return s + x[flex.clip(at[i], -2, 100)] + x[flex.maximum(at[i], at[j])] + x[flex.minimum(at[j], 3)]


def multiplied_twice(s, b, h, i, j, *, at, x):
    return s + x[at[i] * at[i]] + x[abs(at[i]) * abs(at[j])]


def chosen(s, b, h, i, j, *, at, x):
    return s + x[flex.where(i > j, at[i], -at[j])]


def chained(s, b, h, i, j, *, at, x):
    return s + x[at[at[at[i]]]]


def converted(s, b, h, i, j, *, at, x):
    return s + x[flex.cast(flex.cast(at[i], "float32") * 1e30, "int32")] + x[flex.cast(at[j] / 0.5, "int64")]


def squared(s, b, h, i, j, *, at, x, square):
    return s + square[at[i], at[j]] + square[at[j]][i % 5] + x[i % 5]


def masks(b, h, i, j, *, at, x):
    return (x[at[i]] > 0) | (at[at[j]] == at[i])


MODS = (direct, shifted, scaled, multiplied, distance, magnitude, divided, divided_by_data, bits, clipped, chosen)
MODS += (multiplied_twice, chained, converted, squared)


def extremes(dtype: str, count: int) -> np.ndarray:
    info = np.iinfo(dtype)
    legal = [x for x in (*EXTREMES, info.min, info.max) if info.min <= x <= info.max]
    return RNG.choice(np.array(legal, dtype), count)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "int8"])
@pytest.mark.parametrize("mod", [*MODS, masks], ids=lambda mod: mod.__name__)
def test_indices_from_data_stay_inside(mod: Callable[..., Any], dtype: str) -> None:
    """Where arithmetic does not overflow, they are the nearest elements."""
    exact = mod in (direct, clipped, chained, squared, masks)
    exact |= dtype in ("int8", "int32") and mod in (shifted, distance, scaled, magnitude)
    for rows, keys in LENGTHS:
        at_end = bool(RNG.integers(2))
        q = guarded(RNG.standard_normal((1, 2, rows, 8)).astype("f"), at_end)
        k, v = (guarded(RNG.standard_normal((1, 2, keys, 8)).astype("f"), at_end) for _ in range(2))
        arrays = {"at": extremes(dtype, max(rows, keys)), "x": RNG.integers(-4, 5, 5).astype(np.int8)}
        if mod is squared:
            arrays["square"] = RNG.standard_normal((5, 5)).astype("f2")
        captures = {name: guarded(array, at_end) for name, array in arrays.items()}
        options: dict[str, Any] = {"mask_mod" if mod is masks else "score_mod": mod}
        y = flex.flex_attention(q, k, v, **options, captures=captures)
        if exact:
            arrays["at"] = arrays["at"].astype(np.int64)  # as indices are computed
            arguments: Any = (None, mod, arrays) if mod is masks else (mod, None, arrays)
            assert_close(y, compute_reference(q, k, v, *arguments)[0], compute_naive(q, k, v, *arguments)[0])


def test_rows_whose_numbers_overflow_leave_others_alone() -> None:
    """A bound that is the largest number there is hides no keys from rows with other bounds."""

    def mask(b: Any, h: Any, i: Any, j: Any, *, end: Any) -> Any:
        return (j - i < end[i] + 1 - i) & (j < 2 * end[i] + 9)

    x = RNG.standard_normal((1, 1, 40, 8)).astype("f")
    for dtype in ("int32", "int64"):
        end = np.arange(40).astype(dtype)
        end[::3] = np.iinfo(dtype).max
        expected, plain = (
            f(x, x, x, None, mask, {"end": np.arange(40)})[0] for f in (compute_reference, compute_naive)
        )
        y = flex.flex_attention(x, x, x, mask_mod=mask, captures={"end": end})
        keep = np.arange(40) % 3 != 0
        assert_close(y[:, :, keep], expected[:, :, keep], plain[:, :, keep])


@pytest.mark.parametrize("at_end", [True, False])
def test_arrays_of_exact_size(at_end: bool) -> None:
    """Every array ends, or begins, where memory does; with and without a block mask."""

    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any, table: Any) -> Any:
        return s + bias[b, h, i, j] + table[i - j]

    def mask(b: Any, h: Any, i: Any, j: Any, *, shown: Any) -> Any:
        return shown[i, j] | (i == j)

    for rows, keys in LENGTHS:
        q = RNG.standard_normal((2, 4, rows, 8)).astype("f")
        k, v = (RNG.standard_normal((2, 2, keys, 8)).astype("f") for _ in range(2))
        captures = {
            "bias": RNG.standard_normal((2, 4, rows, keys)).astype("f"),
            "table": RNG.standard_normal(max(rows, keys)).astype("f"),
            "shown": RNG.random((rows, keys)) < 0.5,
        }
        expected, plain = (f(q, k, v, mod, mask, captures)[0] for f in (compute_reference, compute_naive))
        inside = {name: guarded(array, at_end) for name, array in captures.items()}
        operands = [guarded(x, at_end) for x in (q, k, v)]
        mask_of_blocks = flex.create_block_mask(mask, None, None, rows, keys, (7, 16), {"shown": inside["shown"]})
        mask_of_blocks.states = guarded(mask_of_blocks.states, at_end)
        left = {name: inside[name] for name in ("bias", "table")}
        for options in ({"mask_mod": mask, "captures": inside}, {"block_mask": mask_of_blocks, "captures": left}):
            y = flex.flex_attention(*operands, score_mod=mod, enable_gqa=True, **options)
            assert_close(y, expected, plain)


def test_states_of_any_number_are_hidden() -> None:
    """Blocks of a block mask that are neither partial nor full are hidden."""
    states = RNG.integers(-128, 128, (1, 1, 5, 9)).astype(np.int8)
    states[RNG.random(states.shape) < 0.5] = 2
    q, k = RNG.standard_normal((1, 1, 40, 8)).astype("f"), RNG.standard_normal((1, 1, 70, 8)).astype("f")
    mask = flex.BlockMask(guarded(states, True), (8, 8), (40, 70), lambda b, h, i, j: i > j)
    shown = np.repeat(np.repeat(states, 8, 2), 8, 3)[..., :70]
    i, j = make_grid((1, 1, 40, 70))[2:]
    dense = (shown == 2) | ((shown == 1) & (i > j))
    arguments = (None, lambda b, h, i, j, *, dense: dense[0, 0, i, j], {"dense": dense})
    y = flex.flex_attention(q, k, k, block_mask=mask)
    assert_close(y, compute_reference(q, k, k, *arguments)[0], compute_naive(q, k, k, *arguments)[0])


def test_blocks_of_hostile_masks() -> None:
    """Blocks that a kernel finds are those of the dense mask."""
    for rows, keys in LENGTHS:
        captures = {"at": extremes("int64", max(rows, keys)), "x": RNG.standard_normal(5)}
        inside = {name: guarded(array, True) for name, array in captures.items()}
        states = flex.create_block_mask(masks, 1, 1, rows, keys, (16, 8), inside).states
        b, h, i, j = make_grid((1, 1, rows, keys))
        dense = np.broadcast_to(masks(b, h, i, j, **{n: Table(x) for n, x in captures.items()}), (1, 1, rows, keys))
        np.testing.assert_array_equal(states, compute_block_states(dense, (16, 8)))


def test_unaligned_and_strided_arrays() -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
        return s + bias[i, j]

    for dtype in ("float32", "float16", "float64"):
        q, k, v = (RNG.standard_normal((2, 30, 2, 8)).astype(dtype).swapaxes(1, 2) for _ in range(3))
        bias = RNG.standard_normal((60, 30))[::2].astype(dtype)
        expected, plain = (f(q, k, v, mod, None, {"bias": bias})[0] for f in (compute_reference, compute_naive))
        for arrange in (lambda x: x, unaligned, np.asfortranarray, lambda x: x[..., ::-1].copy()[..., ::-1]):
            y = flex.flex_attention(*(arrange(x) for x in (q, k, v)), score_mod=mod, captures={"bias": arrange(bias)})
            assert_close(y, expected, plain)
