"""Inputs whose types an operator does not take are rejected, with the types of its definition, by check, too."""

from __future__ import annotations

import onnx
import pytest

import lowering

WRONG = {
    "Reshape": ("(float[2,3] x, float[2] s) => (float[a,b] y) { y = Reshape(x, s) }", "shape is float32.*an integer"),
    "Gelu after it": (
        "(float[2,3] x, float[2] s) => (float[a,b] y) <float c = {1.41421356}, float one = {1.0}, float half = {0.5}> "
        "{ r = Reshape(x, s) d = Div(r, c) e = Erf(d) o = Add(e, one) m = Mul(r, o) y = Mul(m, half) }",
        "shape is float32, and must be an integer",
    ),
    "Gather": ("(float[2,3] x, float[2] s) => (float[a,b] y) { y = Gather(x, s) }", "indices is float32"),
    "Slice": ("(float[2,3] x, float[1] s) => (float[a,b] y) { y = Slice(x, s, s) }", "starts is float32"),
    "Expand": ("(float[2,3] x, double[2] s) => (float[a,b] y) { y = Expand(x, s) }", "shape is float64"),
    "Where": ("(float[2,3] x, float[3] s) => (float[a,b] y) { y = Where(s, x, x) }", "condition is float32.*bool"),
    "Not": ("(float[2,3] x) => (bool[a,b] y) { y = Not(x) }", "X is float32, and must be bool"),
    "Erf": ("(string[2,3] x) => (float[a,b] y) { y = Erf(x) }", "input is string, and must be a float"),
    "Add": (
        "(float[2,3] x, int64[3] s) => (float[a,b] y) { y = Add(x, s) }",
        "input B is int64 and A is float32",
    ),
    "MatMul": ("(float[2,3] x, double[3,2] s) => (float[a,b] y) { y = MatMul(x, s) }", "both must have the same type"),
    "Concat": (
        "(float[2] x, double[2] s) => (float[a] y) { y = Concat<axis = 0>(x, s) }",
        "both must have the same type",
    ),
    "Clip": ("(float[2] x, double s) => (float[a] y) { y = Clip(x, s) }", "input min is float64 and input is float32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_types_that_do_not_fit(name: str) -> None:
    text, why = WRONG[name]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    with pytest.raises(lowering.NodeError, match=why):
        lowering.compile(model)
    assert not lowering.check(model).ok


def test_types_that_may_differ() -> None:
    """Operators with several types, and lists of inputs that may differ."""
    for text in (
        "(float[2] x, int64[2] s) => (float[a] y) { y = Pow(x, s) }",
        "(float[2,3] x, int32[2] s) => (float[a,b] y) { y = Gather(x, s) }",
        "(bool[2] c, int8[2] x) => (int8[2] y) { y = Where(c, x, x) }",
    ):
        lowering.compile(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}'))
