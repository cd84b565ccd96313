"""Gradients of flex_attention: in float64 against differences of NumPy's answers, in other types against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowering
import schedules
from lowering import flex
from lowering.flex.mod import ModSignature
from tests.support.error_codes import raises

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Variant:
    """captures makes arrays of (rng, batches, heads, rows, keys)."""

    score: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    captures: Callable[..., Arrays] = field(default=lambda *_: {})


def _from_sixth(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i > 5) & (i + 3 >= j)


def _capped_alibi(s: Any, b: Any, h: Any, i: Any, j: Any, *, slopes: Any) -> Any:
    return flex.tanh(s / 5) * 5 + slopes[h] * (j - i)


def _by_distance(s: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any) -> Any:
    return s * s * 0.5 + bias[h, i - j]  # from the end where it is negative


def _by_all(s: Any, b: Any, h: Any, i: Any, j: Any, *, bias: Any, factor: Any) -> Any:
    return s * factor + bias[b, h, i, j]


def _looked_up(s: Any, b: Any, h: Any, i: Any, j: Any, *, index: Any, bias: Any, shift: Any) -> Any:
    return s + bias[index[j]] * shift[i] + bias[index[i]]


def _piecewise(s: Any, b: Any, h: Any, i: Any, j: Any, *, knots: Any) -> Any:
    inner = flex.where(s > 0.2, flex.sqrt(s), flex.minimum(s, -0.1 * s) + knots[j % 3])
    return flex.maximum(inner, -1.5) + flex.abs(s) * 0.1 - flex.where(i % 2 == 0, flex.floor(s), 0.0)


def _functions(s: Any, b: Any, h: Any, i: Any, j: Any, *, scales: Any) -> Any:
    positive = 1 + s * s
    return (
        flex.log(positive) * scales[b, h] + flex.exp(-positive) + flex.exp2(-positive) + flex.sin(s) * flex.cos(s) / 3
    )


VARIANTS = {
    "plain": Variant(),
    "causal": Variant(mask=flex.masks.causal),
    "rows that see nothing": Variant(mask=_from_sixth),
    "soft cap and ALiBi": Variant(
        _capped_alibi, flex.masks.causal, lambda rng, b, h, i, j: {"slopes": rng.standard_normal(h)}
    ),
    "by distance": Variant(_by_distance, None, lambda rng, b, h, i, j: {"bias": rng.standard_normal((h, i + j))}),
    "by all, and a number": Variant(
        _by_all,
        _from_sixth,
        lambda rng, b, h, i, j: {"bias": rng.standard_normal((b, h, i, j)), "factor": rng.standard_normal(())},
    ),
    "looked up": Variant(
        _looked_up,
        flex.masks.sliding_window(9),
        lambda rng, b, h, i, j: {
            "index": rng.integers(-5, 5, max(i, j)).astype(np.int32),
            "bias": rng.standard_normal(5),
            "shift": rng.standard_normal(i),
        },
    ),
    "piecewise": Variant(_piecewise, None, lambda rng, b, h, i, j: {"knots": rng.standard_normal(3)}),
    "functions": Variant(
        _functions, flex.masks.causal, lambda rng, b, h, i, j: {"scales": rng.standard_normal((b, h))}
    ),
}

SIZES = {  # B, batches of K and V, Hq, Hkv, S, T, D, Dv
    "grouped": (2, 2, 4, 2, 37, 61, 32, 48),
    "odd": (1, 1, 3, 3, 130, 70, 5, 7),
    "one batch of keys": (3, 1, 2, 1, 20, 33, 24, 16),
    "one row": (2, 2, 2, 2, 1, 9, 16, 16),
}


def _operands(rng: np.random.Generator, sizes: tuple[int, ...]) -> Arrays:
    B, Bk, H, Hk, S, T, D, Dv = sizes
    shapes = {"q": (B, H, S, D), "k": (Bk, Hk, T, D), "v": (Bk, Hk, T, Dv), "dy": (B, H, S, Dv)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def _loss(variant: Variant, arrays: Arrays) -> float:
    """sum(dy * y) in float64, by NumPy."""
    q, k, v = (arrays[name] for name in "qkv")
    G = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, G, axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) / math.sqrt(q.shape[3])
    pair = np.ogrid[tuple(slice(n) for n in s.shape)]
    with np.errstate(all="ignore"):
        if variant.score is not None:
            s = variant.score(s, *pair, **ModSignature(variant.score).bindings(arrays))
    if variant.mask is not None:
        s = np.where(variant.mask(*pair, **ModSignature(variant.mask).bindings(arrays)), s, -np.inf)
    m = s.max(axis=-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(m), 0.0, m))
    l = p.sum(axis=-1, keepdims=True)
    return float((arrays["dy"] * (p / np.where(l == 0, 1.0, l) @ v)).sum())


def _module(variant: Variant, arrays: Arrays, **options: Any) -> flex.FlexModule:
    captures = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "dy")}
    return lowering.compile_flex(
        *(arrays[name] for name in "qkv"),
        variant.score,
        variant.mask,
        enable_gqa=True,
        captures=captures,
        backward=True,
        **options,
    )


def _gradients(module: flex.FlexModule, arrays: Arrays) -> Arrays:
    module(*(arrays[name] for name in "qkv"), **{n: x for n, x in arrays.items() if n not in ("q", "k", "v", "dy")})
    return module.backward(arrays["dy"])


def _name(operand: str) -> str:
    return f"d{operand}" if operand in ("q", "k", "v") else f"d_{operand}"


CASES = {  # which sizes, and whether float32 is looked at, too
    "plain": ("odd", True),
    "causal": ("one row", False),
    "rows that see nothing": ("grouped", False),
    "soft cap and ALiBi": ("grouped", True),
    "by distance": ("odd", False),
    "by all, and a number": ("grouped", False),
    "looked up": ("one batch of keys", True),
    "piecewise": ("grouped", False),
    "functions": ("odd", False),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", VARIANTS)
def test_differences_in_float64_and_the_same_in_float32(name: str) -> None:
    variant, (which, in_float32) = VARIANTS[name], CASES[name]
    rng, sizes = np.random.default_rng(7), SIZES[which]
    arrays = _operands(rng, sizes)
    arrays |= variant.captures(rng, *(sizes[k] for k in (0, 2, 4, 5)))
    gradients = _gradients(_module(variant, arrays), arrays)
    for operand, array in arrays.items():
        if array.dtype != np.float64 or operand == "dy":
            continue
        gradient = gradients[_name(operand)]
        assert gradient.shape == array.shape and gradient.dtype == np.float64
        for _ in range(3):
            direction, step = rng.standard_normal(array.shape), 1e-6
            ends = [_loss(variant, arrays | {operand: array + sign * step * direction}) for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * step)
            size = float(np.abs(gradient * direction).sum()) + 1e-2
            assert abs(float((gradient * direction).sum()) - slope) < 1e-6 * size, operand
    if not in_float32:
        return
    single = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in arrays.items()}
    for operand, gradient in _gradients(_module(variant, single), single).items():
        off = np.abs(gradient - gradients[operand]).max()
        assert off <= 3e-5 * np.abs(gradients[operand]).max(), operand


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision(dtype: Any) -> None:
    variant, rng = VARIANTS["soft cap and ALiBi"], np.random.default_rng(5)
    arrays = _operands(rng, SIZES["grouped"]) | variant.captures(rng, 2, 4, 37, 61)
    half = {name: x.astype(dtype) for name, x in arrays.items()}
    gradients = _gradients(_module(variant, half), half)
    exact = {name: x.astype(np.float64) for name, x in half.items()}
    expected = _gradients(_module(variant, exact), exact)
    unit = float(ml_dtypes.finfo(dtype).eps)
    for name, gradient in expected.items():
        assert gradients[name].dtype == dtype
        # y is rounded to the type, which delta is made of; each gradient once more.
        assert np.abs(gradients[name].astype(np.float64) - gradient).max() < 4 * unit * np.abs(gradient).max(), name


def test_the_plain_kernel_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    variant, rng = VARIANTS["by all, and a number"], np.random.default_rng(9)
    arrays = _operands(rng, (2, 2, 2, 1, 9, 11, 6, 4)) | variant.captures(rng, 2, 2, 9, 11)
    gradients = _gradients(_module(variant, arrays), arrays)
    monkeypatch.setitem(schedules.RULES, "llvm", ())
    module = _module(variant, arrays)
    assert "gradient" not in {kernel.schedule for kernel in module.gradient.manifest.kernels}
    plain = _gradients(module, arrays)
    for name, gradient in gradients.items():
        assert np.allclose(plain[name], gradient, rtol=1e-11, atol=1e-12), name


def test_what_nobody_sees_has_no_part() -> None:
    """NaN and infinity in keys that no row sees, and in values and keys that some rows do not."""
    rng = np.random.default_rng(3)
    arrays = {name: x.astype(np.float32) for name, x in _operands(rng, (1, 1, 2, 2, 70, 90, 32, 32)).items()}

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (j < 64)

    variant = Variant(flex.mods.soft_cap(7.0), near)
    module = _module(variant, arrays)
    expected = _gradients(module, arrays)
    corrupted = dict(arrays)
    for name, value in (("k", np.nan), ("v", np.inf)):
        corrupted[name] = arrays[name].copy()
        corrupted[name][:, :, 64:] = value
    gradients = _gradients(module, corrupted)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(gradients[name], expected[name]), name
    # A key that rows from 40 on see: the gradients of rows before are what they were.
    corrupted["k"] = arrays["k"].copy()
    corrupted["k"][:, :, 40] = np.nan
    corrupted["v"] = arrays["v"]
    gradients = _gradients(module, corrupted)
    assert np.allclose(gradients["dq"][:, :, :40], expected["dq"][:, :, :40], rtol=1e-5, atol=1e-6)
    assert np.isnan(gradients["dq"][:, :, 40:]).all()


def test_block_masks_and_threads() -> None:
    rng = np.random.default_rng(4)
    arrays = {name: x.astype(np.float32) for name, x in _operands(rng, (2, 2, 4, 4, 200, 150, 16, 16)).items()}
    block_mask = flex.create_block_mask(flex.masks.causal, None, None, 200, 150, (64, 32))
    expected = _gradients(_module(Variant(mask=flex.masks.causal), arrays), arrays)
    for threads in (1, 2):
        module = lowering.compile_flex(
            *(arrays[name] for name in "qkv"), block_mask=block_mask, backward=True, threads=threads
        )
        module(*(arrays[name] for name in "qkv"), block_mask=block_mask)
        gradients = module.backward(arrays["dy"])
        for name, gradient in expected.items():
            assert np.allclose(gradients[name], gradient, rtol=1e-5, atol=1e-5), (threads, name)


def test_no_rows_and_no_keys() -> None:
    rng = np.random.default_rng(6)
    variant = VARIANTS["soft cap and ALiBi"]
    sizes = (1, 1, 2, 2, 3, 4, 16, 16)
    arrays = _operands(rng, sizes) | variant.captures(rng, 1, 2, 3, 4)
    module = _module(variant, arrays)
    for rows, keys in ((0, 4), (3, 0)):
        few = dict(arrays, q=arrays["q"][:, :, :rows], dy=arrays["dy"][:, :, :rows])
        few |= {name: arrays[name][:, :, :keys] for name in "kv"}
        gradients = _gradients(module, few)
        assert all(not x.any() for x in gradients.values()) and gradients["dk"].shape == few["k"].shape


def test_a_saved_module_goes_back_without_a_compiler(tmp_path: Any) -> None:
    rng = np.random.default_rng(8)
    variant = VARIANTS["soft cap and ALiBi"]
    arrays = _operands(rng, SIZES["grouped"]) | variant.captures(rng, 2, 4, 37, 61)
    module = _module(variant, arrays)
    expected = _gradients(module, arrays)
    module.save(tmp_path / "module")
    module.save(tmp_path / "module")  # over itself
    loaded = flex.load(tmp_path / "module", captures={"slopes": arrays["slopes"]})
    loaded(*(arrays[name] for name in "qkv"))
    gradients = loaded.backward(arrays["dy"])
    assert all(np.array_equal(gradients[name], expected[name]) for name in expected)


def test_errors() -> None:
    rng = np.random.default_rng(8)
    arrays = _operands(rng, SIZES["grouped"])
    operands = tuple(arrays[name] for name in "qkv")
    module = lowering.compile_flex(*operands, enable_gqa=True)
    with raises("flex.gradient_missing"):
        module.backward(arrays["dy"])
    module = lowering.compile_flex(*operands, enable_gqa=True, backward=True)
    with raises("flex.call_missing"):
        module.backward(arrays["dy"])
    module(*operands)
    with raises("input.dimension_mismatch"):
        module.backward(arrays["dy"][:, :, :5])
