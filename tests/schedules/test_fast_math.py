"""The polynomials of elementary functions against float64, over all magnitudes, and their machine code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from schedules.cpu.elementwise.elementwise import elementwise
from tests.support.this_machine import LEVELS

pytestmark = pytest.mark.optimized

RUNS = {level: tvm.target.Target({"kind": "llvm", "mcpu": level}) for level in LEVELS[1:]}

FUNCTIONS = {
    "exp": np.exp,
    "exp2": np.exp2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "log": np.log,
    "log1p": np.log1p,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "nearbyint": np.rint,
}
UNITS = 4  # in the last position
SMALLEST = 2.0**-125  # smaller results may be 0


def kernel(name: str, target: tvm.target.Target) -> tvm.runtime.Module:
    n = tirx.Var("n", "int64")
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: getattr(tirx, name)(x[i]), name="y")
    return tvm.compile(tvm.IRModule({"main": elementwise(te.create_prim_func([x, y]), target)[0].make()}), target)


def apply(module: tvm.runtime.Module, x: np.ndarray) -> np.ndarray:
    y = tvm.runtime.tensor(np.empty_like(x))
    module["main"](tvm.runtime.tensor(x), y)
    return y.numpy()


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_a_few_units_in_the_last_position(name: str, target: tvm.target.Target) -> None:
    rng = np.random.default_rng(0)
    everywhere = rng.integers(0, 1 << 32, 100_003, dtype=np.uint32).view(np.float32)  # all magnitudes, NaN
    near = rng.uniform(-110, 110, 100_000).astype(np.float32)
    special = np.array([0, -0.0, math.inf, -math.inf, math.nan, 1, -1, 88.7228, -87.3366, 3.9999, 4], np.float32)
    x = np.concatenate([everywhere, near, near / 64, special])
    with np.errstate(all="ignore"):
        expected = FUNCTIONS[name](x.astype(np.float64))
        rounded = expected.astype(np.float32)
    actual = apply(kernel(name, target), x)
    exact = ~np.isfinite(rounded)
    np.testing.assert_array_equal(actual[exact], rounded[exact])
    with np.errstate(all="ignore"):
        error = np.abs(actual.astype(np.float64) - expected) / np.spacing(np.abs(rounded)).astype(np.float64)
        flushed = (np.abs(x) < 2.0**-126) & (
            np.abs(actual - expected) < 2.0**-126
        )  # subnormal arguments may count as 0
    wrong = ~exact & (error > UNITS) & ~((np.abs(expected) < SMALLEST) & (actual == 0)) & ~flushed
    assert not wrong.any(), (x[wrong][:5], actual[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_calls_for_single_elements(name: str) -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v4"})
    assembly = kernel(name, target).mod.inspect_source("asm")
    assert "zmm" in assembly
    assert f"{name}f" not in assembly and f"{name}@" not in assembly


@pytest.mark.parametrize("target", RUNS.values(), ids=RUNS)
def test_ties_go_to_even_and_zeros_keep_their_sign(target: tvm.target.Target) -> None:
    rng = np.random.default_rng(0)
    halves = np.arange(-300, 300, dtype=np.float32) / 2
    near = np.nextafter(np.repeat(halves, 2), np.tile([-np.inf, np.inf], len(halves))).astype(np.float32)
    large = rng.uniform(-(2**25), 2**25, 10_000).astype(np.float32)
    x = np.concatenate([halves, near, large, np.array([0.0, -0.0, -0.4, 0.5, -0.5, 2**23 - 0.5], np.float32)])
    y = apply(kernel("nearbyint", target), x)
    np.testing.assert_array_equal(y, np.rint(x))
    np.testing.assert_array_equal(np.signbit(y), np.signbit(np.rint(x)))
