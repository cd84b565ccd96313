"""Layer and RMS norms, in every form that exporters write."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest

from tests.fusion.graphs import check_fused, check_untouched, count_operators, fuse_model, parse_graph

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal(8).astype(np.float32),
    "b": RNG.standard_normal(8).astype(np.float32),
    "w16": RNG.standard_normal(8).astype(np.float16),
    "b16": RNG.standard_normal(8).astype(np.float16),
    "rows": RNG.standard_normal((3, 1)).astype(np.float32),
    "eps": np.array(1e-3, np.float32),
    "two": np.array(2, np.float32),
    "three": np.array(3, np.float32),
    "one": np.array(1, np.float32),
    "half": np.array(0.5, np.float32),
    "minus_half": np.array(-0.5, np.float32),
    "last": np.array([-1]),
    "before": np.array([1]),
}

SQUARES = ("sq = Pow ({x}, two)", "sq = Mul ({x}, {x})")
DIVISIONS = (
    "r = Sqrt (e) n = Div ({x}, r)",
    "r = Sqrt (e) i = Reciprocal (r) n = Mul ({x}, i)",
    "r = Sqrt (e) i = Div (one, r) n = Mul (i, {x})",
    "i = Pow (e, minus_half) n = Mul ({x}, i)",
    "r = Pow (e, half) n = Div ({x}, r)",
)
MEAN = "m2 = ReduceMean (sq, last) e = Add (m2, eps)"
CENTRED = "m = ReduceMean (x, last) d = Sub (x, m)"


def make_model(nodes: str, x: str = "float[B, 3, 8]", y: str = "float[B, 3, 8]", opset: int = 18) -> onnx.ModelProto:
    return parse_graph(f"({x} x) => ({y} y) {{ {nodes} }}", opset, WEIGHTS)


@pytest.mark.parametrize("square, division", itertools.product(SQUARES, DIVISIONS))
@pytest.mark.parametrize("scale", ["y = Mul (n, w)", "y = Mul (w, n)", "y = Identity (n)"])
def test_rms_norm_cases_1_and_2(square: str, division: str, scale: str) -> None:
    nodes = f"{square} {MEAN} {division} {scale}".format(x="x")
    check_fused(make_model(nodes), {"RMSNormalization": 1, "ReduceMean": 0, "Mul": 0})


def test_rms_norm_before_opset_18() -> None:
    nodes = "sq = Mul (x, x) m2 = ReduceMean <axes = [-1]> (sq) e = Add (eps, m2) r = Sqrt (e) n = Div (x, r) "
    check_fused(make_model(nodes + "y = Mul (n, w)", opset=13), {"RMSNormalization": 1})


@pytest.mark.parametrize(
    "end, narrow", [("c = Cast <to = 10> (n) y = Mul (w16, c)", True), ("f = Mul (n, w) y = Cast <to = 10> (f)", False)]
)
def test_rms_norm_case_3_in_float32(end: str, narrow: bool) -> None:
    nodes = f"h = Cast <to = 1> (x) sq = Pow (h, two) {MEAN} r = Sqrt (e) i = Reciprocal (r) n = Mul (h, i) {end}"
    result = check_fused(
        make_model(nodes, "float16[B, 3, 8]", "float16[B, 3, 8]"), {"RMSNormalization": 1, "Mul": 0}, 2e-3, 2e-3
    )
    (node,) = (n for n in result.graph if n.op_type == "RMSNormalization")
    assert (node.inputs[0] is result.graph.inputs[0]) == narrow


@pytest.mark.parametrize(
    "nodes",
    [
        "sq = Pow (x, three) m2 = ReduceMean (sq, last) e = Add (m2, eps) r = Sqrt (e) y = Div (x, r)",
        "sq = Mul (x, x) m2 = ReduceMean (sq, before) e = Add (m2, eps) r = Sqrt (e) y = Div (x, r)",
        "sq = Mul (x, x) m2 = ReduceSum (sq, last) e = Add (m2, eps) r = Sqrt (e) y = Div (x, r)",
        "g = Abs (x) sq = Mul (x, x) m2 = ReduceMean (sq, last) e = Add (m2, eps) r = Sqrt (e) y = Div (g, r)",
        "sq = Mul (x, x) m2 = ReduceMean (sq, last) e = Add (m2, rows) r = Sqrt (e) y = Div (x, r)",
        "sq = Mul (x, x) m2 = ReduceMean (sq, last) e = Add (m2, eps) r = Sqrt (e) y = Mul (x, r)",
    ],
)
def test_rms_norm_refuses(nodes: str) -> None:
    check_untouched(make_model(nodes))


def test_a_factor_of_rows_stays_a_matmul() -> None:
    nodes = f"sq = Mul (x, x) {MEAN} r = Sqrt (e) n = Div (x, r) y = Mul (n, rows)"
    check_fused(make_model(nodes), {"RMSNormalization": 1, "Mul": 1})


@pytest.mark.parametrize("square, division", itertools.product(SQUARES, DIVISIONS))
def test_layer_norm_case_1(square: str, division: str) -> None:
    nodes = f"{CENTRED} {square} {MEAN} {division} s = Mul (n, w) y = Add (s, b)".format(x="d")
    check_fused(make_model(nodes), {"LayerNormalization": 1, "ReduceMean": 0, "Sub": 0, "Add": 0})


@pytest.mark.parametrize(
    "end, inputs",
    [("s = Mul (w, n) y = Add (b, s)", 3), ("y = Mul (n, w)", 2), ("y = Add (n, b)", 3), ("y = Identity (n)", 2)],
)
def test_layer_norm_case_2(end: str, inputs: int) -> None:
    nodes = f"{CENTRED} sq = Mul (d, d) {MEAN} r = Sqrt (e) n = Div (d, r) {end}"
    result = check_fused(make_model(nodes), {"LayerNormalization": 1})
    assert [len(n.inputs) for n in result.graph if n.op_type == "LayerNormalization"] == [inputs]


def test_layer_norm_with_its_difference_computed_twice() -> None:
    nodes = "m = ReduceMean (x, last) d = Sub (x, m) d2 = Sub (x, m) sq = Pow (d2, two)"
    check_fused(
        make_model(f"{nodes} {MEAN} r = Sqrt (e) n = Div (d, r) y = Mul (n, w)"), {"LayerNormalization": 1, "Sub": 0}
    )


@pytest.mark.parametrize(
    "end",
    [
        "c = Cast <to = 10> (n) s = Mul (c, w16) y = Add (s, b16)",
        "s = Mul (n, w) t = Add (s, b) y = Cast <to = 10> (t)",
    ],
)
def test_layer_norm_case_3_in_float32(end: str) -> None:
    nodes = "h = Cast <to = 1> (x) m = ReduceMean (h, last) d = Sub (h, m) sq = Pow (d, two)"
    nodes += f" {MEAN} r = Sqrt (e) n = Div (d, r) {end}"
    check_fused(
        make_model(nodes, "float16[B, 3, 8]", "float16[B, 3, 8]"), {"LayerNormalization": 1, "Sub": 0}, 2e-3, 2e-3
    )


def test_layer_norm_case_4_difference_in_a_wider_type() -> None:
    nodes = "m = ReduceMean (x, last) d0 = Sub (x, m) d = Cast <to = 1> (d0) sq = Pow (d, two) "
    nodes += f"{MEAN} r = Sqrt (e) n = Div (d, r) c = Cast <to = 10> (n) s = Mul (c, w16) y = Add (s, b16)"
    check_fused(
        make_model(nodes, "float16[B, 3, 8]", "float16[B, 3, 8]"), {"LayerNormalization": 1, "Cast": 0}, 4e-3, 4e-3
    )


def test_layer_norm_case_4_refuses_a_result_that_stays_wide() -> None:
    nodes = "m = ReduceMean (x, last) d0 = Sub (x, m) d = Cast <to = 1> (d0) sq = Pow (d, two) "
    nodes += f"{MEAN} r = Sqrt (e) n = Div (d, r) y = Mul (n, w)"
    assert not count_operators(fuse_model(make_model(nodes, "float16[B, 3, 8]")))["LayerNormalization"]


def test_a_difference_from_another_tensor_is_not_a_layer_norm() -> None:
    nodes = "g = Abs (x) m = ReduceMean (g, last) d = Sub (x, m) sq = Mul (d, d)"
    nodes += f" {MEAN} r = Sqrt (e) n = Div (d, r) y = Mul (n, w)"
    counts = count_operators(fuse_model(make_model(nodes)))
    assert not counts["LayerNormalization"] and counts["Sub"] == 1


def test_two_norms_of_one_input_are_fused_separately() -> None:
    nodes = f"sq = Mul (x, x) {MEAN} r = Sqrt (e) n = Div (x, r) u = Mul (n, w) v = Mul (n, b) y = Sub (u, v)"
    check_fused(make_model(nodes), {"RMSNormalization": 1, "Mul": 2, "ReduceMean": 0})


def test_float64_refuses() -> None:
    nodes = "sq = Mul (x, x) m2 = ReduceMean (sq, last) e = Add (m2, eps64) r = Sqrt (e) y = Div (x, r)"
    check_untouched(
        parse_graph(f"(double[B, 8] x) => (double[B, 8] y) {{ {nodes} }}", 18, WEIGHTS | {"eps64": np.array(1e-3)})
    )
