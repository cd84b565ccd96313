"""The SIMD building blocks against NumPy, at every width."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules.cpu.primitives import vector
from tests.support.this_machine import LEVELS, WIDEST

TARGETS = {name: tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": name}) for name in LEVELS}


def elementwise(f: Callable, x: np.ndarray, out_dtype: str, lanes: int, target: tvm.target.Target) -> np.ndarray:
    """f, a function of vectors, at every element of x (whose size is a multiple of lanes)."""
    y = np.zeros(x.shape, out_dtype)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        a = T.arg("a", T.Buffer(x.shape, str(x.dtype), align=x.itemsize))
        b = T.arg("b", T.Buffer(y.shape, out_dtype, align=y.itemsize))
        with T.serial(x.size // lanes) as i:
            vector.store(b, f(vector.load(a, lanes, i * lanes)), i * lanes)
    return call(builder.get(), target, x, y)


def call(func: tvm.tirx.PrimFunc, target: tvm.target.Target, *arrays: np.ndarray) -> np.ndarray:
    tensors = [tvm.runtime.tensor(a) for a in arrays]
    tvm.compile(tvm.IRModule({"main": func}), target=target)(*tensors)
    return tensors[-1].numpy()


def test_machine_follows_the_features_not_the_name() -> None:
    def machine(**config: object) -> vector.CpuFeatures:
        return vector.read_cpu_features(tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", **config}))

    assert machine(mcpu="x86-64-v4").lanes("float32") == 16
    assert machine(mcpu="x86-64-v4", mattr=["-avx512f"]).lanes("float32") == 8
    assert machine(mcpu="x86-64", mattr=["+avx2", "+f16c"]) == machine(mcpu="x86-64-v3")
    assert machine(mcpu="x86-64").lanes("float64") == 2
    neon = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": ["+neon"]})
    assert vector.read_cpu_features(neon).lanes("float32") == 4


@pytest.mark.parametrize(
    ("dtype", "lanes", "tolerance"), [("float32", 16, 2.5e-7), ("float32", 1, 2.5e-7), ("float64", 4, 4e-16)]
)
def test_exp2(dtype: str, lanes: int, tolerance: float) -> None:
    lowest = {"float32": -126, "float64": -1022}[dtype]
    x = np.random.default_rng(0).uniform(lowest, 100, 4096).astype(dtype)
    special = np.array([-np.inf, lowest - 1, -1e30, np.nan, 0, 1, -1, lowest - 500] * 2, dtype)
    y = elementwise(vector.exp2, np.concatenate([x, special]), dtype, lanes, TARGETS[WIDEST])
    assert np.abs(y[:4096] / np.exp2(x.astype(np.longdouble)) - 1).max() < tolerance
    np.testing.assert_array_equal(y[4096:4104], [0, 0, 0, np.nan, 1, 2, 0.5, 0])


@pytest.mark.parametrize(("dtype", "lanes", "tolerance"), [("float32", 8, 4e-7), ("float64", 8, 1e-9)])
def test_tanh(dtype: str, lanes: int, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], 4096) * 10.0 ** rng.uniform(-6, 2, 4096)).astype(dtype)
    special = np.array([np.inf, -np.inf, np.nan, 0, 9.01, -9.01, 1e30, 20], dtype)
    y = elementwise(vector.tanh, np.concatenate([x, special]), dtype, lanes, TARGETS["x86-64-v3"])
    assert np.abs(y[:4096] / np.tanh(x) - 1).max() < tolerance
    np.testing.assert_allclose(y[4096:], np.tanh(special), rtol=2.5e-7)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_half_converts_both_ways(target: tvm.target.Target) -> None:
    cpu = vector.read_cpu_features(target)
    every = np.arange(2**16, dtype=np.uint16)
    for dtype in ("float16", "bfloat16"):
        half = every.view(dtype if dtype == "float16" else ml_dtypes.bfloat16)
        wide = elementwise(lambda x: vector.convert(x, "float32", cpu), half, "float32", 8, target)
        np.testing.assert_array_equal(wide, half.astype(np.float32))
        with np.errstate(all="ignore"):
            # Every half, and what lies a quarter, a half and three quarters of the way to the next one up.
            bits = wide.view(np.uint32)[~np.isnan(wide)]
            step = {"float16": 2**13, "bfloat16": 2**16}[dtype]
            floats = np.concatenate([bits + k * step // 4 for k in range(4)] + [bits + step // 2 - 1]).view(np.float32)
            floats = np.append(floats, np.full(-floats.size % 8, np.nan, np.float32))
            expected = floats.astype(half.dtype)
        for lanes in (1, 8):
            got = elementwise(lambda x, d=dtype: vector.convert(x, d, cpu), floats, dtype, lanes, target)
            np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
def test_transpose_and_reductions(lanes: int) -> None:
    x = np.random.default_rng(0).integers(-99, 99, (lanes, lanes)).astype(np.float32)
    out = np.zeros((lanes + 2, lanes), np.float32)
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        a = T.arg("a", T.Buffer(x.shape, "float32", align=4))
        b = T.arg("b", T.Buffer(out.shape, "float32", align=4))
        rows = [T.bind(vector.load(a, lanes, i, 0)) for i in range(lanes)]
        for i, row in enumerate(vector.transpose(rows)):
            vector.store(b, row, i, 0)
        vector.store(b, vector.sum_vector_lanes(rows), lanes, 0)
        largest = vector.reduce_lanes(rows[0], lambda p, q: T.max(p, q))
        vector.store(b, vector.splat(largest, lanes, "float32"), lanes + 1, 0)
    out = call(builder.get(), TARGETS[WIDEST], x, out)
    np.testing.assert_array_equal(out[:lanes], x.T)
    np.testing.assert_array_equal(out[lanes], x.sum(1))
    np.testing.assert_array_equal(out[lanes + 1], np.full(lanes, x[0].max()))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 10, 16, 17, 40, 64, 80])
def test_cover_touches_each_element_and_no_other(length: int) -> None:
    w, starts = vector.cover_row(length, 16)
    assert {start + k for start in starts for k in range(w)} == set(range(length))


def test_numbers_are_fixed_as_they_are() -> None:
    """The body of a parallel loop is a function of its own: it would read a variable, and divide by it."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("main")
        rows = T.arg("rows", T.int64())
        assert vector.let(T.int64(3) * 4 + 2).value == 14
        assert not isinstance(vector.let(rows + 1), tvm.tirx.IntImm)
        assert not isinstance(vector.let(T.int64(2) - 2), tvm.tirx.IntImm)  # by which something may be divided
        T.evaluate(0)
    assert builder.get() is not None
