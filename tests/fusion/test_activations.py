"""Gelu and Swish, with their multiplications in any order."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

from tests.fusion.graphs import check_fused, check_untouched, parse_graph

WEIGHTS = {
    name: np.array(number, np.float32)
    for name, number in {
        "half": 0.5,
        "one": 1.0,
        "two": 2.0,
        "three": 3.0,
        "root": math.sqrt(2),
        "rroot": math.sqrt(0.5),
        "a": math.sqrt(2 / math.pi),
        "c": 0.044715,
        "ac": math.sqrt(2 / math.pi) * 0.044715,
        "quick": 1.702,
        "other": 0.7,
    }.items()
}


def make_model(nodes: str, dtype: str = "float") -> onnx.ModelProto:
    types = {"float": np.float32, "float16": np.float16}
    weights = {name: array.astype(types[dtype]) for name, array in WEIGHTS.items()}
    return parse_graph(f"({dtype}[B, 3, 7] x, {dtype}[B, 3, 7] z) => ({dtype}[B, 3, 7] y) {{ {nodes} }}", 18, weights)


ERF = ("u = Div (x, root) f = Erf (u) t = Add (f, one)", "u = Mul (rroot, x) f = Erf (u) t = Add (one, f)")
TANH = (
    "p = Pow (x, three) q = Mul (c, p) r = Add (x, q) u = Mul (a, r)",
    "p = Mul (x, x) q = Mul (p, x) r = Mul (q, c) s = Add (r, x) u = Mul (s, a)",
    "p = Mul (c, x) q = Mul (p, x) r = Add (q, one) s = Mul (x, a) u = Mul (s, r)",  # BLOOM
    "p = Pow (x, three) q = Mul (ac, p) r = Mul (a, x) u = Add (q, r)",
)
MATMULS = (
    "h = Mul (half, t) y = Mul (x, h)",
    "h = Mul (x, half) y = Mul (h, t)",
    "h = Mul (x, t) y = Mul (h, half)",
    "h = Div (x, two) y = Mul (t, h)",
    "h = Mul (t, x) y = Mul (half, h)",
)


@pytest.mark.parametrize("matmuls", MATMULS)
@pytest.mark.parametrize("erf", ERF)
def test_gelu_case_1_erf(erf: str, matmuls: str) -> None:
    result = check_fused(make_model(f"{erf} {matmuls}"), {"Gelu": 1, "Erf": 0, "Mul": 0, "Add": 0})
    assert "approximate" not in next(n for n in result.graph if n.op_type == "Gelu").attributes


@pytest.mark.parametrize("matmuls", MATMULS)
@pytest.mark.parametrize("tanh", TANH)
def test_gelu_case_2_tanh(tanh: str, matmuls: str) -> None:
    check_fused(
        make_model(f"{tanh} f = Tanh (u) t = Add (f, one) {matmuls}"), {"Gelu": 1, "Tanh": 0, "Mul": 0, "Add": 0}
    )


def test_gelu_with_constants_of_half_precision() -> None:
    check_fused(make_model(f"{TANH[0]} f = Tanh (u) t = Add (f, one) {MATMULS[0]}", "float16"), {"Gelu": 1}, 6e-3, 6e-3)


@pytest.mark.parametrize(
    "nodes",
    [
        "u = Div (x, two) f = Erf (u) t = Add (f, one) h = Mul (half, t) y = Mul (x, h)",
        "u = Div (x, root) f = Erf (u) t = Add (f, two) h = Mul (half, t) y = Mul (x, h)",
        "u = Div (x, root) f = Erf (u) t = Add (f, one) h = Mul (half, t) y = Mul (z, h)",
        "u = Div (x, root) f = Erf (u) t = Add (f, one) h = Mul (two, t) y = Mul (x, h)",
        "u = Div (x, root) f = Erf (u) t = Add (f, one) h = Mul (half, t) g = Mul (x, h) y = Add (t, g)",
        f"p = Pow (x, three) q = Mul (c, p) r = Add (z, q) u = Mul (a, r) f = Tanh (u) t = Add (f, one) {MATMULS[0]}",
        f"p = Pow (x, three) q = Mul (c, p) r = Add (x, q) u = Mul (c, r) f = Tanh (u) t = Add (f, one) {MATMULS[0]}",
    ],
)
def test_gelu_refuses(nodes: str) -> None:
    check_untouched(make_model(nodes))


@pytest.mark.parametrize(
    "nodes, alpha",
    [
        ("s = Sigmoid (x) y = Mul (x, s)", 1.0),
        ("s = Sigmoid (x) y = Mul (s, x)", 1.0),
        ("u = Mul (x, quick) s = Sigmoid (u) y = Mul (x, s)", 1.702),
        ("u = Div (x, two) s = Sigmoid (u) y = Mul (x, s)", 0.5),
    ],
)
def test_swish(nodes: str, alpha: float) -> None:
    result = check_fused(make_model(nodes), {"Swish": 1, "Sigmoid": 0, "Mul": 0, "Div": 0})
    attribute = next(n for n in result.graph if n.op_type == "Swish").attributes.get("alpha")
    assert (1.0 if attribute is None else attribute.as_float()) == pytest.approx(alpha)


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Sigmoid (z) y = Mul (x, s)",
        "s = Sigmoid (x) g = Mul (x, s) y = Add (g, s)",
        "u = Mul (x, x) s = Sigmoid (u) y = Mul (x, s)",
        "u = Add (x, one) s = Sigmoid (u) y = Mul (x, s)",
    ],
)
def test_swish_refuses(nodes: str) -> None:
    check_untouched(make_model(nodes))


def test_swiglu_keeps_its_matmul() -> None:
    check_fused(make_model("s = Sigmoid (x) g = Mul (x, s) y = Mul (g, z)"), {"Swish": 1, "Mul": 1})
