"""flex_attention on emulated GPUs against float64: mods of PyTorch's tests and of the library, block masks."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowering
from lowering.flex import masks, mods
from lowering.flex.captured import read_array_specs
from lowering.flex.problem import FlexProblem, build_settings
from tests import cuda_emulation as emulated
from tests.flex import mod_cases
from tests.flex.flex_reference import assert_close, compute_naive, compute_reference, compute_visible
from tests.flex.mod_cases import Case

TURNS = list(itertools.product(emulated.ORDERS, emulated.ARRIVALS))


# -- mods in addition to those of tests/flex/mod_cases.py -----------------------------


def causal_by_bits(b, h, i, j, *, bits):
    """Test bits of integers of 32 and 64 bits."""
    shown = ((bits[i] >> (j & 31)) ^ (i << 2 >> 3)) & 1
    return ((shown == 1) | (i - j < 3)) & (i >= j)


def by_small_numbers(b, h, i, j, *, kind):
    return (kind[b, i // 2] == kind[b, j // 2]) | (kind[b, j // 2] == -1)


def by_kind_of_head(b, h, i, j):
    return ((h % 2 == 0) & (i >= j)) | ((h % 2 == 1) & (abs(i - j) <= 20) & (i % 5 != 0))


def chained(s, b, h, i, j, *, bias):
    return mods.soft_cap(4.0)(mods.relative_bias(s, b, h, i, j, bias=bias), b, h, i, j)


def powered(s, b, h, i, j):
    return (s * s + 1) ** 1.25 - 2.0 ** (s / 8)


def of_positions(high: int, dtype: str) -> Callable[..., np.ndarray]:
    return lambda rng, shape: rng.integers(0, high, max(shape[2:])).astype(dtype)


def pages(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Draw a permutation of pages of 16 keys for each batch, of which every third is free."""
    count = -(-shape[3] // 16)
    order = np.stack([rng.permutation(count) for _ in range(shape[0])])
    return {"logical": np.where(order % 3 == 2, -1, order), "lengths": rng.integers(1, shape[3] + 1, shape[0])}


def grown(rng: np.random.Generator, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Draw a tree with a node for each row, each below an earlier one, after the keys of a context."""
    parents = [int(rng.integers(-1, node)) for node in range(shape[2])]
    return {"ancestors": masks.ancestors_of(parents), "context": rng.integers(0, shape[3], shape[0]).astype("i4")}


OWN = (
    Case("words", None, causal_by_bits, lambda rng, shape: {"bits": of_positions(2**32, "u4")(rng, shape)}),
    Case("words of 64 bits", None, causal_by_bits, lambda rng, shape: {"bits": of_positions(2**40, "i8")(rng, shape)}),
    Case(
        "small numbers",
        None,
        by_small_numbers,
        lambda rng, shape: {"kind": rng.integers(-1, 3, (shape[0], max(shape[2:]))).astype("i1")},
    ),
    Case("heads of two kinds", None, by_kind_of_head),
    Case("powers of scores", powered),
    Case(
        "cap over a half-precision bias, window",
        chained,
        masks.sliding_window(40),
        lambda rng, shape: {"bias": rng.standard_normal((shape[1], 65)).astype(ml_dtypes.bfloat16)},
    ),
    Case(
        "buckets of T5, prefix by batch",
        mods.t5_buckets(),
        masks.prefix_lm_by_batch,
        lambda rng, shape: {
            "bias": rng.standard_normal((shape[1], 32)).astype("f"),
            "prefix": rng.integers(0, shape[3], shape[0]),
        },
        single=True,
    ),
    Case("pages", None, masks.paged(masks.causal, 16), pages),
    Case("an image", None, masks.neighborhood((16, 12), (5, 4))),
    Case("tiles of an image", None, masks.sliding_tile((12, 16), 4, 3)),
    Case("dilated", None, masks.dilated(21, 3)),
    Case("a tree", None, masks.tree, grown),
)
CASES = {case.name: case for case in (*mod_cases.SCORES, *mod_cases.MASKS, *mod_cases.COMBINATIONS, *OWN)}


# -- one artifact, called at several lengths --------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Properties of an artifact."""

    dtype: str = "float16"
    heads: tuple[int, int] = (4, 2)
    widths: tuple[int, int] = (64, 64)
    blocks: tuple[int, int] | None = None
    """Block size of a block mask, whose states follow from the mask, or are made `by_hand`."""
    by_hand: bool = False


LENGTHS = [(3, 140), (150, 170), (131, 65)]
"""Few rows, for which there are kernels of their own; more keys than rows, and fewer."""


def states_of(dense: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the states of blocks of a mask that is materialized."""
    counts = [-(-length // block) for length, block in zip(dense.shape[2:], size)]
    padded = np.zeros((*dense.shape[:2], counts[0] * size[0], counts[1] * size[1]), bool)
    padded[:, :, : dense.shape[2], : dense.shape[3]] = dense
    blocks = padded.reshape(*dense.shape[:2], counts[0], size[0], counts[1], size[1])
    return np.where(blocks.all((3, 5)), 2, blocks.any((3, 5))).astype(np.int8)


def in_blocks(mask: Callable[..., Any], states: np.ndarray, size: tuple[int, int]) -> Callable[..., Any]:
    """Return the visible pairs under a block mask."""

    def mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        state = states[b, h, i // size[0], j // size[1]]
        return (state == 2) | ((state == 1) & mask(b, h, i, j))

    return mod


def problem(case: Case, kind: Kind, captures: dict[str, np.ndarray]) -> FlexProblem:
    (heads, kv_heads), (d, dv), specs = kind.heads, kind.widths, read_array_specs(captures)
    settings = build_settings(case.score, case.mask, specs, kind.dtype, None, d, kind.blocks)
    q, k, v = ("batch", heads, "rows", d), ("batch", kv_heads, "keys", d), ("batch", kv_heads, "keys", dv)
    blocks = None if kind.blocks is None else (True, True)
    return FlexProblem(kind.dtype, q, k, v, settings, tuple(specs.items()), blocks, lse=True)


def check(name: str, kind: Kind, lengths: list[tuple[int, int]], arch: str) -> None:
    """Check an artifact at several lengths, in the emulation's process. Hidden keys and values are poison."""
    case, model = CASES[name], None
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    for rows, keys in lengths:
        (heads, kv_heads), (d, dv), batch = kind.heads, kind.widths, 2
        shape = batch, heads, rows, keys
        sizes = {"q": (batch, heads, rows, d), "k": (batch, kv_heads, keys, d), "v": (batch, kv_heads, keys, dv)}
        q, k, v = (rng.standard_normal(size).astype(kind.dtype) for size in sizes.values())
        captures = case.captures(rng, shape)
        if model is None:
            model = lowering.compile(problem(case, kind, captures).to_onnx(), f"cuda:{arch}")
        feeds, mask = {"q": q, "k": k, "v": v, **captures}, case.mask
        if kind.blocks is not None:
            states = states_of(compute_visible(mask, shape, captures), kind.blocks)
            if kind.by_hand:
                states = rng.integers(0, 3, states.shape, np.int8)
                mask = in_blocks(mask, states, kind.blocks)
            feeds[model.inputs[3].name] = states
        seen = compute_visible(mask, shape, captures)
        unseen = ~seen.any(2).reshape(batch, kv_heads, -1, keys).any(2)
        k[unseen], v[unseen] = np.nan, np.inf
        results = model.run(feeds)
        expected, plain = (f(q, k, v, case.score, mask, captures) for f in (compute_reference, compute_naive))
        single = case.single and kind.dtype == "float64"
        assert_close(results["y"], expected[0], plain[0], single=single)
        assert_close(results["lse"], expected[1], plain[1], "lse", 20, single)
        hidden = ~seen.any(3)
        assert (results["y"][hidden] == 0).all() and np.isneginf(results["lse"][hidden]).all()


def run(name: str, kind: Kind, arch: str, lengths: list[tuple[int, int]] = LENGTHS) -> None:
    order, arrivals = TURNS[zlib.crc32(name.encode()) % len(TURNS)]
    emulated.run(check, name, kind, lengths, arch, arch=arch, order=order, arrivals=arrivals, timeout=500)


BF16 = Kind("bfloat16", (6, 1), (72, 40))
QUICK = [
    ("head_offset and documents", BF16, "sm_80"),
    ("cap over a half-precision bias, window", Kind(), "sm_80"),
    ("buckets of T5, prefix by batch", Kind(heads=(2, 2), widths=(16, 16)), "sm_80"),
    ("small numbers", Kind(widths=(16, 16), blocks=(48, 32)), "sm_80"),
    ("heads of two kinds", Kind("bfloat16", (4, 2), (32, 32), (64, 32), by_hand=True), "sm_80"),
    ("words", Kind("float32", (2, 1), (8, 5)), "sm_80"),
    ("cap over a half-precision bias, window", BF16, "sm_90a"),
    ("heads of two kinds", Kind("float16", (4, 2), (32, 32), (64, 32), by_hand=True), "sm_90a"),
    ("documents_by_batch", Kind(), "sm_90a"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "kind", "arch"), QUICK)
def test_mods(name: str, kind: Kind, arch: str) -> None:
    run(name, kind, arch)


def kinds(number: int) -> list[Kind]:
    """Return other kinds for each number, so that every choice meets many cases. Positions in tables differ by type."""
    sizes = [(64, 64), (72, 40), (128, 128), (16, 256)]
    heads = [(4, 2), (2, 2), (6, 1), (8, 2)]
    dtypes = ["float16", "bfloat16"]
    return [
        Kind(dtypes[number % 2], heads[number % 4], sizes[number // 2 % 4]),
        Kind(dtypes[1 - number % 2], heads[number // 2 % 4], (32, 32), [(64, 64), (48, 80), (128, 16)][number % 3]),
        Kind(["float32", "float64"][number % 2], heads[number % 4], (5, 33)),
    ]


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[*CASES])
def test_all_mods(number: int, arch: str) -> None:
    name = [*CASES][number]
    for kind in kinds(number):
        blocks = None if CASES[name].mask is None else kind.blocks
        kind = dataclasses.replace(kind, blocks=blocks)
        if kind.dtype in ("float16", "bfloat16"):
            run(name, kind, arch)
        elif arch == "sm_80":  # the same kernels for both
            run(name, kind, arch, [(3, 140), (33, 65)])


# -- hidden keys and values ------------------------------------------------------------------------------------------


def poisoned(arch: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return Y with poison in keys that only some rows see, the expected Y, and which rows see them."""
    rng, (rows, keys) = np.random.default_rng(0), (150, 150)
    case = Case("window", mods.soft_cap(5.0), masks.sliding_window(30))
    q, k, v = (rng.standard_normal((1, 2, length, 64)).astype("float16") for length in (rows, keys, keys))
    k[:, :, 90], v[:, :, [20, 70]], v[:, :, 149] = np.nan, np.inf, np.nan
    model = lowering.compile(problem(case, Kind(heads=(2, 2)), {}).to_onnx(), f"cuda:{arch}")
    y = model.run({"q": q, "k": k, "v": v})["y"]
    finite = [np.where(np.isfinite(x), x, x.dtype.type(0)) for x in (k, v)]
    expected, _ = compute_reference(q, *finite, case.score, case.mask)
    seen = compute_visible(case.mask, (1, 2, rows, keys))
    return y, expected, seen[..., [20, 70, 90, 149]].any(-1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_know_nothing_of_values_that_they_do_not_see(arch: str) -> None:
    y, expected, concerned = emulated.run(poisoned, arch, arch=arch, timeout=500)
    np.testing.assert_allclose(y[~concerned], expected[~concerned], rtol=2e-3, atol=2e-3)
    assert not np.isfinite(y[concerned]).any()
