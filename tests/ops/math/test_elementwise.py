"""Arithmetic: every type, cases that C leaves undefined, NaN, symbolic sizes, and contents of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from tvm import tirx

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.ops.expectations import FLOATS, Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-3, 0.5, -0.5, 1.5, 2.5, -2.5, 20.0, -20.0, 88.0, -88.0, 100.0]


def wrap_integer(value: int, dtype: str) -> int:
    """Return the integer modulo the size of the type."""
    info = np.iinfo(dtype)
    return (value - int(info.min)) % (int(info.max) - int(info.min) + 1) + int(info.min)


def apply_exactly(function: Callable[..., int], *arrays: np.ndarray) -> np.ndarray:
    """Apply a function of Python's integers at each index, and wrap the results."""
    broadcast = np.broadcast_arrays(*arrays)
    result = [
        wrap_integer(function(*map(int, elements)), arrays[0].dtype.name)
        for elements in zip(*(a.flat for a in broadcast))
    ]
    return np.array(result, dtype=arrays[0].dtype).reshape(broadcast[0].shape)


def divide_truncated(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("dtype", ("int8", "int32", "int64", "uint8", "uint16", "uint64"))
def test_integers(dtype: str) -> None:
    info, signed = np.iinfo(dtype), dtype.startswith("int")
    a = RNG.integers(info.min, info.max, (3, 24), dtype=dtype, endpoint=True)
    b = RNG.integers(info.min, info.max, (24,), dtype=dtype, endpoint=True)
    b[:6] = [0, 1, 2, 3, 7, info.max]
    if signed:
        b[6:9] = [-1, -2, info.min]
        a[:, 6] = info.min  # the minimum divided by -1
    few, high = (np.array(v, dtype) for v in (3, 90))
    case = Expectations(opset=28)
    case.expect("Add", [a, b], apply_exactly(lambda x, y: x + y, a, b))
    case.expect("Sub", [a, b], apply_exactly(lambda x, y: x - y, a, b))
    case.expect("Mul", [a, b], apply_exactly(lambda x, y: x * y, a, b))
    case.expect("Div", [a, b], apply_exactly(divide_truncated, a, b))
    case.expect("Mod", [a, b], apply_exactly(lambda x, y: x % y if y else 0, a, b))
    case.expect("Mod", [a, b], apply_exactly(lambda x, y: x - divide_truncated(x, y) * y if y else 0, a, b), fmod=1)
    case.expect("Max", [a, b, few], np.maximum(np.maximum(a, b), few))
    case.expect("Min", [a, b], np.minimum(a, b))
    case.expect("Clip", [a, few, high], np.minimum(np.maximum(a, few), high))
    case.expect("Clip", [a, high, few], np.full_like(a, few))
    case.expect("Abs", [a], apply_exactly(abs, a))
    case.expect("Sign", [a], np.sign(a))
    case.expect("BitwiseNot", [a], ~a)
    if signed:
        case.expect("Neg", [a], apply_exactly(lambda x: -x, a))
    base, exponent = RNG.integers(0, 9, (3, 24)).astype(dtype), RNG.integers(0, 12, (24,)).astype(dtype)
    case.expect("Pow", [base, exponent], apply_exactly(pow, base, exponent))
    case.expect("Pow", [base // 2, exponent.astype("float32") // 4], apply_exactly(pow, base // 2, exponent // 4))
    bits = info.bits
    count = np.array([0, 1, bits - 1, bits, 100] + ([-1] if signed else []), dtype)
    x = np.stack([a[0, : count.size], ~a[0, : count.size]])

    left = apply_exactly(lambda x, c: x << c if 0 <= c < bits else 0, x, count)
    right = apply_exactly(lambda x, c: x >> c if 0 <= c < bits else x >> bits, x, count)

    case.expect("BitShift", [x, count], left, direction="LEFT")
    case.expect("BitShift", [x, count], right, direction="RIGHT")
    case.check()


def test_integer_powers_of_negative_exponents() -> None:
    base = np.array([1, -1, -1, 2, 0], "int32")
    exponent = np.array([-3, -3, -2, -1, -1], "int64")
    case = Expectations()
    case.expect("Pow", [base, exponent], np.array([1, -1, 1, 0, 0], "int32"))
    case.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(dtype: str) -> None:
    x = np.array(SPECIAL + list(RNG.standard_normal(24) * 3)).astype(dtype).reshape(4, 10)
    y = np.array(list(RNG.standard_normal(24) * 3) + SPECIAL).astype(dtype).reshape(4, 10)
    wx, wy = x.astype("float64"), y.astype("float64")
    ones, twos = np.array(1, dtype), np.array(2, dtype)
    case = Expectations(opset=28)

    def expect(operator: str, inputs: list[np.ndarray], expected: np.ndarray, **attributes: Any) -> None:
        case.expect(operator, inputs, expected.astype(dtype), **attributes)

    with np.errstate(all="ignore"):
        expect("Add", [x, y], wx + wy)
        expect("Sub", [x, y], wx - wy)
        expect("Mul", [x, y], wx * wy)
        expect("Div", [x, y], wx / wy)
        expect("Max", [x, y, x[:, :1]], np.maximum(np.maximum(wx, wy), wx[:, :1]))
        expect("Min", [x, y], np.minimum(wx, wy))
        expect("Sum", [x, y, x], wx + wy + wx)
        expect("Mean", [x, y], (wx + wy) / 2)
        expect("Mod", [x, y], np.fmod(wx, wy), fmod=1)
        expect("Mod", [x, y], np.mod(wx, wy), fmod=0)
        expect("Pow", [np.abs(x), y], np.power(np.abs(wx), wy))
        expect("Pow", [x, np.arange(10) - 4], np.power(wx, np.arange(10) - 4))
        expect("Clip", [x, -ones, ones], np.clip(wx, -1, 1))
        expect("Clip", [x, twos, ones], np.where(np.isnan(wx), np.nan, 1))
        functions = {
            "Abs": np.abs, "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh,
            "Atan": np.arctan, "Atanh": np.arctanh, "Ceil": np.ceil, "Cos": np.cos, "Cosh": np.cosh,
            "Erf": np.vectorize(math.erf), "Exp": np.exp, "Floor": np.floor, "Log": np.log, "Neg": np.negative,
            "Reciprocal": np.reciprocal, "Round": np.rint, "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh,
            "Sqrt": np.sqrt, "Tan": np.tan,
        }  # fmt: skip
        for operator, function in functions.items():
            if dtype != "bfloat16" or operator in ("Asin", "Ceil", "Exp", "Neg", "Reciprocal", "Round", "Sign", "Sqrt"):
                expect(operator, [x], function(wx))
    case.expect("IsNaN", [x], np.isnan(wx))
    case.expect("IsInf", [x], np.isinf(wx))
    case.expect("IsInf", [x], np.isposinf(wx), detect_negative=0)
    case.expect("IsInf", [x], np.zeros(x.shape, bool), detect_negative=0, detect_positive=0)
    case.check()


def test_constant_exponents_become_matmuls() -> None:
    for exponent, kernels in ((2.0, {"power"}), (3.0, {"power"}), (0.5, {"power"})):
        proto = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 20]> g (float[N] x) => (float[N] y) '
            f"{{ e = Constant<value_float={exponent}>() y = Pow(x, e) }}"
        )
        module = import_model(load_model(proto), lookup).module
        assert list_kernels(module) == kernels
        assert ("T.pow" in module.script(show_meta=False)) == (exponent == 0.5)
        x = np.array([0.0, 1.0, 2.5], "float32")
        np.testing.assert_allclose(lowering.compile(proto).run({"x": x})["y"], x**exponent, rtol=1e-6)


def list_kernels(module: Any) -> set[str]:
    return {g.name_hint for g, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}


# -- symbolic sizes ---------------------------------------------------------------------------------------------------


def test_broadcasting_symbolic_sizes() -> None:
    x, y = RNG.standard_normal((4, 1, 5)).astype("float32"), RNG.standard_normal((3, 5)).astype("float32")
    z = RNG.standard_normal((4, 3, 1)).astype("float32")
    case = Expectations()
    for operator, function in (("Add", np.add), ("Max", np.maximum), ("Pow", lambda a, b: np.power(np.abs(a), b))):
        a = np.abs(x) if operator == "Pow" else x
        case.expect(operator, [a, y], function(a, y), dims=[("n", 1, "m"), ("k", "p")])
        case.expect(operator, [a, y[0]], function(a, y[0]), dims=[("n", 1, "m"), (5,)])
    case.expect("Min", [x, z], np.minimum(x, z), dims=[("n", 1, "m"), ("q", "r", 1)])
    case.check()


def test_sizes_that_do_not_broadcast() -> None:
    with raises("node.shapes_not_broadcastable"):
        import_node("Add", [("float32", (4,)), ("float32", (5,))])
    with raises("node.shapes_not_broadcastable"):
        import_node("Pow", [("float32", (4,)), ("float32", (5,))])


def test_symbolic_sizes_that_differ_at_run_time_are_an_error() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N] x, float[M] y) => (float[N] z) { z = Add(x, y) }'
    )
    module = lowering.compile(proto)
    ones = np.ones(3, "float32")
    np.testing.assert_array_equal(module.run({"x": ones, "y": ones})["z"], ones + ones)
    with raises("run.size_mismatch"):
        module.run({"x": ones, "y": np.ones(4, "float32")})


# -- contents ---------------------------------------------------------------------------------------------------------


def test_arithmetic_on_shapes_is_symbolic() -> None:
    """Values computed from sizes become expressions: there are only kernels that cache them."""
    body = """
        s = Shape(x) two = Constant<value_ints=[2]>() three = Constant<value_int=3>()
        a = Add(s, two) b = Sub(s, two) c = Mul(s, a) d = Div(b, two) e = Mod(s, three) f = Min(s, c, two) g = Max(d, e)
        h = Neg(b) i = Abs(h) j = Clip(s, two, three) k = Mod<fmod=1>(h, three)
        y = Concat<axis=0>(a, b, c, d, e, f, g, h, i, j, k)
    """.replace("two, three) k", "two0, three) k").replace("three = ", "two0 = Constant<value_int=2>() three = ")
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> g (float[N, M] x) => (int64[K] y) {{{body}}}'
    )
    assert {k.partition("_")[0] for k in list_kernels(import_model(load_model(proto), lookup).module)} == {"sizes"}
    module = lowering.compile(proto)
    for n, m in ((1, 7), (6, 2)):
        s = np.array([n, m])
        a, b = s + 2, s - 2
        d = np.trunc(b / 2).astype(int)
        expected = [a, b, s * a, d, s % 3, np.minimum(np.minimum(s, s * a), 2), np.maximum(d, s % 3), -b, np.abs(b),
                    np.clip(s, 2, 3), np.fmod(-b, 3)]  # fmt: skip
        actual = module.run({"x": np.zeros((n, m), "float32")})["y"]
        np.testing.assert_array_equal(actual, np.concatenate(expected))


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_elements_that_are_bit_patterns_are_refused() -> None:
    with raises("node.dtype_unsupported"):
        import_node("IsNaN", [("float8_e4m3fn", (4,))])
