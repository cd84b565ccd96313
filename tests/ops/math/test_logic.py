"""Comparisons and boolean operators: every type, NaN, strings, and contents of shapes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import lowering
from tests.ops.expectations import Expectations

RNG = np.random.default_rng(0)
COMPARISONS = {
    "Equal": np.equal, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int32", "uint64", "float16", "bfloat16", "float32", "float64"))
def test_comparisons(dtype: str) -> None:
    a, b = RNG.integers(0, 5, (4, 6)).astype(dtype), RNG.integers(0, 5, (6,)).astype(dtype)
    if "float" in dtype:
        a[0, :4], b[:3] = [np.nan, np.inf, -np.inf, -0.0], [np.nan, np.inf, -np.inf]
        b[3] = 0.0
    case = Expectations()
    with np.errstate(invalid="ignore"):
        for operator, function in COMPARISONS.items():
            case.expect(operator, [a, b], function(a, b), dims=[("n", 6), ("m",)])
    case.check()


def test_boolean_operators() -> None:
    a, b = np.array([[False], [True]]), np.array([False, True])
    case = Expectations()
    case.expect("And", [a, b], a & b)
    case.expect("Or", [a, b], a | b)
    case.expect("Xor", [a, b], a ^ b)
    case.expect("Equal", [a, b], a == b)
    case.expect("Not", [a], ~a)
    case.check()


def test_strings_are_equal_by_value() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (string[N] x, string[N] y) => (bool[N] a, bool[N] b) '
        '{ pattern = Constant<value_strings=["cat"]>() a = Equal(x, y) b = Equal(x, pattern) }'
    )
    x, y = np.array(["cat", "dog", "cow"], object), np.array(["dog", "dog", "cat"], object)
    results = lowering.compile(proto).run({"x": x, "y": y})
    assert results["a"].tolist() == [False, True, False]
    assert results["b"].tolist() == [True, False, False]


def test_comparisons_of_shapes_are_symbolic() -> None:
    """All values are static up to the sizes, so that one kernel stores the results."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[N, M] x) => (bool[K] y) {
            s = Shape(x) three = Constant<value_ints=[3]>()
            a = Equal(s, three) b = Less(s, three) c = LessOrEqual(s, three) d = Greater(s, three)
            e = GreaterOrEqual(s, three) f = And(a, c) g = Or(a, b) h = Xor(c, e) i = Not(h) j = Equal(b, i)
            y = Concat<axis=0>(a, b, c, d, e, f, g, h, i, j)
        }""")
    module = lowering.compile(proto)
    for n, m in ((1, 3), (4, 2)):
        s = np.array([n, m])
        a, b, c, d, e = s == 3, s < 3, s <= 3, s > 3, s >= 3
        expected = [a, b, c, d, e, a & c, a | b, c ^ e, ~(c ^ e), b == ~(c ^ e)]
        np.testing.assert_array_equal(module.run({"x": np.zeros((n, m), "float32")})["y"], np.concatenate(expected))
