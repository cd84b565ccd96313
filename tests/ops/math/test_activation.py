"""Activations where they overflow or cancel, in every float type; softmax over any axes; dropout."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.ops.expectations import FLOATS, Expectations

RNG = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, np.nan, 20, -20, 60, -60, 87, -87, 89, -89, 1000, -1000, 1e-4, -1e-4]


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    p = np.exp(x - x.max(axis=axes, keepdims=True))
    return p / p.sum(axis=axes, keepdims=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_pointwise(dtype: str) -> None:
    x = np.array(SPECIAL + list(RNG.standard_normal(25) * 2)).astype(dtype).reshape(4, 10)
    wide = x.astype("float64")
    case = Expectations()
    with np.errstate(all="ignore"):
        case.expect("Sigmoid", [x], (1 / (1 + np.exp(-wide))).astype(dtype), dims=[("n", 10)])
        case.expect("Swish", [x], (wide / (1 + np.exp(-1.5 * wide))).astype(dtype), alpha=1.5)
        case.expect("Gelu", [x], gelu(wide).astype(dtype))
        case.expect("Gelu", [x], gelu_tanh(wide).astype(dtype), approximate="tanh")
        case.expect("Tanh", [x], np.tanh(wide).astype(dtype))
        case.expect("Relu", [x], np.maximum(wide, 0).astype(dtype))
        case.expect("LeakyRelu", [x], np.where(wide < 0, 0.25 * wide, wide).astype(dtype), alpha=0.25)
        case.expect("HardSigmoid", [x], np.clip(0.25 * wide + 0.5, 0, 1).astype(dtype), alpha=0.25)
        case.expect("HardSwish", [x], (wide * np.clip(wide / 6 + 0.5, 0, 1)).astype(dtype))
        case.expect("Elu", [x], np.where(wide < 0, 2 * np.expm1(wide), wide).astype(dtype), alpha=2.0)
        case.expect("Softplus", [x], np.logaddexp(0, wide).astype(dtype))
        case.expect("Mish", [x], (wide * np.tanh(np.logaddexp(0, wide))).astype(dtype))
        case.expect("Softsign", [x], (wide / (1 + np.abs(wide))).astype(dtype))
        case.expect("PRelu", [x, x[0]], np.where(wide < 0, wide * wide[0], wide).astype(dtype))
    case.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_results_of_the_tanh_gelu_are_accurate(dtype: str) -> None:
    """1 + tanh u cancels where u is far below 0: each result is accurate relative to itself."""
    x = np.linspace(-5, -2, 7).astype(dtype)
    wide = x.astype("float64")
    case = Expectations()
    for value, right in zip(x, gelu_tanh(wide).astype(dtype)):  # one by one, so that larger values do not hide errors
        case.expect("Gelu", [value[None]], right[None], approximate="tanh")
    case.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_softmax(dtype: str) -> None:
    x = (RNG.standard_normal((3, 5, 7)) * 4).astype(dtype)
    x[0, 0], x[1, 0, :3] = -np.inf, -np.inf  # a fully masked row is NaN, as in NumPy
    symbolic = [("a", "b", "c")]
    new, old = Expectations(), Expectations(opset=11)
    with np.errstate(all="ignore"):
        for axis in (0, 1, -1):
            p = softmax(x.astype("float64"), (axis,))
            new.expect("Softmax", [x], p.astype(dtype), dims=symbolic, axis=axis)
            if dtype != "bfloat16":
                flat = softmax(x.astype("float64"), tuple(range(axis % 3, 3)))
                old.expect("Softmax", [x], flat.astype(dtype), dims=symbolic, axis=axis)
        y = x[2:]
        new.expect("LogSoftmax", [y], np.log(softmax(y.astype("float64"), (1,))).astype(dtype), dims=symbolic, axis=1)
    first = np.array([[2, 5, 5], [1, 0, 0]], dtype)
    new.expect("Hardmax", [first], np.array([[0, 1, 0], [1, 0, 0]], dtype))
    new.check()
    if old.nodes:
        old.check()


def test_softmax_accumulates_in_float32() -> None:
    """4096 equal half precision scores: an accumulator in float16 would stop growing at 2048."""
    x = np.zeros((1, 4096), "float16")
    case = Expectations()
    case.expect("Softmax", [x], np.full_like(x, 1 / 4096))
    case.check()


def test_dropout() -> None:
    x = RNG.standard_normal((2, 3)).astype("float32")
    case = Expectations()
    case.expect("Dropout", [x], x, np.ones(x.shape, bool), dims=[("n", "m")])
    case.expect("Dropout", [x, np.array(0.75, "float32")], x)
    case.check()
