"""Normalization: every axis and type, statistics as outputs, scales that broadcast, data far from zero."""

from __future__ import annotations

import numpy as np
import pytest

import lowering
from tests.ops.expectations import FLOATS, Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
SYMBOLIC = ("a", "b", "c")


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype("float64")


def standardized(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    x = wide(x)
    return (x - x.mean(axis=axes, keepdims=True)) / np.sqrt(x.var(axis=axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_over_the_last_axes(dtype: str) -> None:
    x = (RNG.standard_normal((3, 4, 7)) * 2 + 1).astype(dtype)
    case = Expectations()
    for axis in (0, 1, -1):
        axes, shape = tuple(range(axis % 3, 3)), x.shape[axis:]
        scale, bias = (RNG.standard_normal(shape).astype(dtype) for _ in range(2))
        y = standardized(x, axes) * wide(scale)
        case.expect("LayerNormalization", [x, scale], y.astype(dtype), dims=[SYMBOLIC, None], axis=axis)
        case.expect("LayerNormalization", [x, scale, bias], (y + wide(bias)).astype(dtype), axis=axis)
        mean_square = (wide(x) ** 2).mean(axis=axes, keepdims=True)
        y = wide(x) / np.sqrt(mean_square + 1e-5) * wide(scale)
        case.expect("RMSNormalization", [x, scale], y.astype(dtype), dims=[SYMBOLIC, SYMBOLIC[axis:]], axis=axis)
    case.check()


def test_statistics_are_outputs_of_the_stash_type() -> None:
    x, scale = RNG.standard_normal((3, 4, 5)).astype("float16"), RNG.standard_normal((4, 5)).astype("float16")
    mean = wide(x).mean(axis=(1, 2), keepdims=True)
    inverse = 1 / np.sqrt(wide(x).var(axis=(1, 2), keepdims=True) + 1e-3)
    y = ((wide(x) - mean) * inverse * wide(scale)).astype("float16")
    case = Expectations()
    for stash, name in ((1, "float32"), (16, "bfloat16")):
        case.expect(
            "LayerNormalization", [x, scale], y, mean.astype(name), inverse.astype(name),
            dims=[SYMBOLIC, None], axis=1, epsilon=1e-3, stash_type=stash,
        )  # fmt: skip
    case.check()


def test_variance_far_from_zero() -> None:
    """The mean of squares minus the square of the mean would be 0 or negative here."""
    x = (10_000 + np.arange(64) % 2).astype("float32").reshape(1, 64)
    y = standardized(x, (1,)).astype("float32")  # -1 and 1: the mean and the variance are exact
    case = Expectations()
    case.expect("LayerNormalization", [x, np.ones(64, "float32")], y)
    case.check()


def test_scales_that_broadcast() -> None:
    x = RNG.standard_normal((2, 3, 4)).astype("float32")
    case = Expectations()
    for shape in ((1,), (4,), (3, 1), (1, 4)):
        scale = RNG.standard_normal(shape).astype("float32")
        y = wide(x) / np.sqrt((wide(x) ** 2).mean(axis=(1, 2), keepdims=True) + 1e-5) * scale
        case.expect("RMSNormalization", [x, scale], y.astype("float32"), dims=[SYMBOLIC, None], axis=1)
    other = RNG.standard_normal(4).astype("float32")  # the result has the type of the scale
    half = x.astype("float16")
    y = wide(half) / np.sqrt((wide(half) ** 2).mean(axis=-1, keepdims=True) + 1e-5) * other
    case.expect("RMSNormalization", [half, other], y.astype("float32"))
    case.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_over_channels(dtype: str) -> None:
    x = (RNG.standard_normal((2, 6, 5, 3)) + 3).astype(dtype)
    scale, bias = (RNG.standard_normal(6).astype(dtype) for _ in range(2))
    gain, offset = wide(scale).reshape(6, 1, 1), wide(bias).reshape(6, 1, 1)
    dims = [("n", 6, "h", "w"), None, None]
    case = Expectations()
    y = standardized(x, (2, 3)) * gain + offset
    case.expect("InstanceNormalization", [x, scale, bias], y.astype(dtype), dims=dims)
    y = standardized(x.reshape(2, 3, 2, 5, 3), (2, 3, 4)).reshape(x.shape) * gain + offset
    case.expect("GroupNormalization", [x, scale, bias], y.astype(dtype), dims=dims, num_groups=3)
    variance = np.abs(scale) + np.array(1, dtype)
    y = (wide(x) - offset) / np.sqrt(wide(variance).reshape(6, 1, 1) + 1e-5) * gain + offset
    case.expect("BatchNormalization", [x, scale, bias, bias, variance], y.astype(dtype), dims=[*dims, None, None])
    case.check()


def test_refusals() -> None:
    f = "float32"
    with raises("batch_normalization.training_unsupported"):
        import_node("BatchNormalization", [(f, (2, 3, 4)), *[(f, (3,))] * 4], training_mode=1)
    with raises("node.size_not_divisible"):
        import_node("GroupNormalization", [(f, (2, 5, 4)), (f, (5,)), (f, (5,))], num_groups=2)
    for shape in ((5,), (2, 2, 3, 4)):
        with raises("node.shapes_not_broadcastable"):
            import_node("RMSNormalization", [(f, (2, 3, 1)), (f, shape)])


@pytest.mark.parametrize("dtype", FLOATS)
def test_across_channels(dtype: str) -> None:
    x = (RNG.standard_normal((2, 5, 3, 2)) * 3).astype(dtype)
    case = Expectations()
    for size, settings in ((1, {}), (2, {"alpha": 0.25}), (5, {"beta": 0.5, "bias": 2.0}), (40, {"alpha": 2.0})):
        accumulated = np.zeros(x.shape)
        for c in range(5):
            first = c - (size - 1) // 2
            accumulated[:, c] = (wide(x)[:, max(first, 0) : first + size] ** 2).sum(1)
        base = settings.get("bias", 1.0) + settings.get("alpha", 1e-4) / size * accumulated
        y = wide(x) / base ** settings.get("beta", 0.75)
        case.expect("LRN", [x], y.astype(dtype), dims=["abcd"], size=size, **settings)
        case.expect("LRN", [x[:, :, 0, 0]], y[:, :, 0, 0].astype(dtype), size=size, **settings)
    case.check()


@pytest.mark.parametrize(
    "dims, dtype, size, message", [("nchw", "float32", 0, "size is 0"), ("n", "float32", 3, "rank 1"),
                                   ("nchw", "int32", 3, "int32")])  # fmt: skip
def test_across_channels_refusals(dims: str, dtype: str, size: int, message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node("LRN", [(dtype, list(dims))], size=size)
