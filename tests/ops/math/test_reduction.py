"""Reductions: every type, the sources of axes, empty axes, and contents of shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import lowering
from tests.ops.expectations import Expectations, assert_close, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
Function = Callable[..., np.ndarray]
FUNCTIONS: dict[str, Function] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
    "ReduceL1": lambda x, **k: np.sum(np.abs(x), **k),
    "ReduceL2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    "ReduceSumSquare": lambda x, **k: np.sum(x * x, **k),
    "ReduceLogSum": lambda x, **k: np.log(np.sum(x, **k)),
    "ReduceLogSumExp": lambda x, **k: np.log(np.sum(np.exp(x), **k)),
}
# The results of empty reductions.
NOTHING = {"ReduceMax": -np.inf, "ReduceProd": 1, "ReduceMean": np.nan, "ReduceLogSumExp": -np.inf}


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "int32", "uint64"))
def test_types(dtype: str) -> None:
    x = RNG.integers(1, 6, (3, 7, 5)).astype(dtype)
    case = Expectations(opset=20)
    for operator, function in FUNCTIONS.items():
        if dtype != "float32" and operator not in ("ReduceMean", "ReduceMax", "ReduceProd", "ReduceL2"):
            continue  # shares the code of other types
        wide = x.astype("float64")
        case.expect(operator, [x, np.array([1])], function(wide, axis=1, keepdims=True).astype(dtype))
    case.check()


def test_axes() -> None:
    """Axes from an attribute, or from an input at run time; negative, all, none; with and without keepdims."""
    x = RNG.standard_normal((3, 4, 5)).astype("float32")
    old, new = Expectations(opset=12), Expectations()
    symbolic = ("a", "b", "c")
    for keepdims in (0, 1):
        for axes in ([0], [-1, 0], [0, 1, 2]):
            expected = np.sum(x, axis=tuple(axes), keepdims=bool(keepdims))
            old.expect("ReduceSum", [x], expected, dims=[symbolic], axes=axes, keepdims=keepdims)
            if (axes, keepdims) != ([0, 1, 2], 1):
                new.expect("ReduceSum", [x, np.array(axes)], expected, dims=[symbolic, None], keepdims=keepdims)
        expected = np.max(x, keepdims=bool(keepdims))
        old.expect("ReduceMax", [x], expected, dims=[symbolic], keepdims=keepdims)
        new.expect("ReduceMax", [x, np.zeros(0, "int64")], expected, dims=[symbolic, None], keepdims=keepdims)
    new.expect("ReduceSumSquare", [x], x * x, dims=[symbolic], noop_with_empty_axes=1)
    old.check()
    new.check()


def test_special_values() -> None:
    inf, nan = np.inf, np.nan
    x = np.array([[nan, 1, 2], [inf, -inf, 0], [-inf, -inf, -inf], [inf, inf, 1]], "float32")
    expected = {
        "ReduceMax": [nan, inf, -inf, inf], "ReduceMin": [nan, -inf, -inf, 1], "ReduceSum": [nan, nan, -inf, inf],
        "ReduceLogSumExp": [nan, inf, -inf, inf],
    }  # fmt: skip
    case = Expectations()
    for operator, values in expected.items():
        case.expect(operator, [x, np.array([1])], np.array(values, "float32"), keepdims=0)
    large = np.array([[1000, 1000], [-1000, -1000]], "float32")
    case.expect("ReduceLogSumExp", [large, np.array([1])], large[:, :1] + np.log(np.float32(2)))
    booleans = np.array([[True, False], [False, False]])
    case.expect("ReduceMax", [booleans, np.array([1])], booleans.max(axis=1, keepdims=True))
    case.expect("ReduceMin", [booleans, np.array([1])], booleans.min(axis=1, keepdims=True))
    case.expect("ReduceMean", [np.array([[-3, -4]], "int32"), np.array([1])], np.array([[-3]], "int32"))
    case.check()


def test_nothing_to_reduce() -> None:
    """An axis whose symbolic size is 0 at run time."""
    case = Expectations(opset=20)
    for operator in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceLogSumExp"):
        expected = np.full((3,), NOTHING.get(operator, 0), "float32")
        case.expect(
            operator, [np.ones((3, 0), "float32"), np.array([1])], expected, dims=[("n", "m"), None], keepdims=0
        )
    case.expect(
        "ReduceMean",
        [np.ones((3, 0), "int32"), np.array([1])],
        np.zeros(3, "int32"),
        dims=[("n", "m"), None],
        keepdims=0,
    )
    case.expect(
        "ReduceMax",
        [np.ones((0, 2), "int8"), np.array([0])],
        np.full(2, -128, "int8"),
        dims=[("n", 2), None],
        keepdims=0,
    )
    case.check()


def test_contents() -> None:
    """Multiplied sizes, the number of elements, reach Reshape as an expression."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[N, M] x) => (float[K] y, int64[4] z) {
            s = Shape(x) n = ReduceProd(s) y = Reshape(x, n)
            sum = ReduceSum(s) max = ReduceMax(s) min = ReduceMin(s) z = Concat<axis=0>(n, sum, max, min)
        }""")
    module = lowering.compile(proto)
    for shape in ((2, 3), (5, 1)):
        x = RNG.standard_normal(shape).astype("float32")
        results = module.run({"x": x})
        assert_close(results["y"], x.reshape(-1), "y")
        assert_close(results["z"], np.array([x.size, sum(shape), max(shape), min(shape)]), "z")


def test_refusals() -> None:
    with raises("node.axis_out_of_range"):
        import_node("ReduceSum", [("float32", (2, 3))], opset=12, axes=[2])
    with raises("node.static_length_required"):
        import_node("ReduceSum", [("float32", (2, 3)), ("int64", ("k",))])
