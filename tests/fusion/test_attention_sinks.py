"""Attention with sinks written out becomes the compiler's own Attention; graphs that must not match stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from tests.fusion.graphs import check_untouched, count_operators, draw_feeds, fuse_model, parse_graph, run_model

INPUTS = "float[B, 4, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 6] v"
REPEATED = """
    sh = Shape (k) b = Slice (sh, zero, one) t = Slice (sh, two, three)
    ks = Concat <axis = 0> (b, two, two, t, eight) vs = Concat <axis = 0> (b, two, two, t, six)
    ks4 = Concat <axis = 0> (b, four, t, eight) vs4 = Concat <axis = 0> (b, four, t, six)
    k5 = Unsqueeze (k, two) ke = Expand (k5, ks) k4 = Reshape (ke, ks4)
    v5 = Unsqueeze (v, two) ve = Expand (v5, vs) v4 = Reshape (ve, vs4)
    kt = Transpose <perm = [0, 1, 3, 2]> (k4) qsh = Shape (q) s1 = Slice (qsh, two, three)
    column = Concat <axis = 0> (b, four, s1, one)
"""
SINK = "s4 = Reshape (sink, flat) sc = Expand (s4, column)"
MAXIMUM = "top = ReduceMax (j, last) d = Sub (j, top)"
PLAIN = "a = MatMul (q, kt) m1 = Mul (a, c) x = Add (m1, m)"
AFTER = "w = Slice (p, zero, last, last) y = MatMul (w, v4)"
WEIGHTS: dict[str, np.ndarray] = {
    **{name: np.array([n]) for name, n in {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "six": 6, "eight": 8,
                                            "last": -1, "end": 2**63 - 1}.items()},
    "flat": np.array([1, -1, 1, 1]), "c": np.float32(0.3), "cap": np.float32(2.0), "pads": np.array([0] * 7 + [1]),
    "pads_in_front": np.array([0, 0, 0, 1, 0, 0, 0, 0]), "zeros": np.zeros((1, 1, 1, 1), np.float32),
    "sink": np.array([0.3, -1.0, 2.0, 0.5], np.float32), "ones": np.ones((1, 1, 1, 1), np.float32),
    "negative": np.float32(-0.5),
}  # fmt: skip


def make_model(nodes: str, more: str = "float[B, 1, S, T] m", opset: int = 18) -> onnx.ModelProto:
    return parse_graph(f"({INPUTS}, {more}) => (float[B, 4, S, 6] y) {{ {REPEATED} {nodes} }}", opset, WEIGHTS)


def make_softmax(scores: str = PLAIN, sink: str = SINK, joined: str = "j = Concat <axis = -1> (x, sc)",
                 last: str = MAXIMUM, after: str = AFTER) -> str:  # fmt: skip
    return f"{scores} {sink} {joined} {last} p = Softmax <axis = -1> ({'d' if last else 'j'}) {after}"


def check_fused(source: onnx.ModelProto, tolerance: float = 2e-6) -> ir.Node:
    """Return the Attention node with sinks; check the compiled model against onnxruntime on the unfused model."""
    result = fuse_model(source)
    assert {name: count_operators(result)[name] for name in ("Attention", "Softmax", "MatMul")} == {
        "Attention": 1, "Softmax": 0, "MatMul": 0
    }  # fmt: skip
    (node,) = (node for node in result.graph if node.op_type == "Attention")
    assert node.domain == "onnx_lowering" and len(node.inputs) == 8
    arrays = draw_feeds(source)
    (expected,) = run_model(source, arrays)
    (actual,) = lowering.compile(source).run(arrays).values()
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=tolerance)
    return node


@pytest.mark.parametrize(
    "operators",
    [
        {},
        {"last": ""},
        {"joined": "j = Concat <axis = 3> (sc, x)", "after": "w = Slice (p, one, end, last) y = MatMul (w, v4)"},
        {"after": "w = Slice (p, zero, t, last) y = MatMul (w, v4)"},
        {"after": "parts = Concat <axis = 0> (t, one) w, rest = Split <axis = -1> (p, parts) y = MatMul (w, v4)"},
        {"joined": "j = Concat <axis = -1> (sc, x)",
         "after": "parts = Concat <axis = 0> (one, t) rest, w = Split <axis = 3> (p, parts) y = MatMul (w, v4)"},
    ],
    ids=str,
)  # fmt: skip
def test_cases_1_and_2_order_and_maximum(operators: dict[str, str]) -> None:
    node = check_fused(make_model(make_softmax(**operators)))
    k = node.inputs[1]
    assert k is not None and k.name == "k"  # heads are not repeated


@pytest.mark.parametrize(
    "sink",
    [
        "s3 = Unsqueeze (sink, axes) sc = Expand (s3, column)",
        "s4 = Reshape (sink, flat) reps = Concat <axis = 0> (b, one, s1, one) sc = Tile (s4, reps)",
        "sc = ConstantOfShape <value = float[1] {0.5}> (column)",
        "sc = Expand (c, column)",
    ],
)
def test_case_3_forms_of_the_sink(sink: str) -> None:
    source = make_model(make_softmax(sink=sink))
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2]), "axes"))
    check_fused(source)


@pytest.mark.parametrize(
    "scores, joined",
    [
        ("r = Mul (q, c) a = MatMul (r, kt) x = Add (a, m)", "j = Concat <axis = -1> (x, sc)"),
        ("a = MatMul (q, kt) u = Div (a, cap) h = Tanh (u) g = Mul (h, cap) x = Add (g, m)",
         "j = Concat <axis = -1> (x, sc)"),
        ("x = MatMul (q, kt)", "j0 = Concat <axis = -1> (x, sc) mp = Pad (m, pads) j = Add (j0, mp)"),
        ("x = MatMul (q, kt)", "j0 = Concat <axis = -1> (x, sc) j1 = Mul (j0, c) mp = Pad (m, pads) j = Add (mp, j1)"),
        ("x = MatMul (q, kt)",
         "j0 = Concat <axis = -1> (x, sc) mp = Pad (m, pads) j1 = Add (j0, mp) j = Div (j1, cap)"),
        ("x = MatMul (q, kt)",
         "mc = Concat <axis = 0> (b, one, s1, one) z = Expand (zeros, mc) mp = Concat <axis = -1> (m, z) "
         "j0 = Concat <axis = -1> (x, sc) j = Add (j0, mp)"),
    ],
)  # fmt: skip
def test_case_4_scales_and_masks_before_and_after_the_column(scores: str, joined: str) -> None:
    check_fused(make_model(make_softmax(scores, joined=joined)))


@pytest.mark.parametrize("heads", ["k5 = Unsqueeze (k, two) kt = Transpose <perm = [0, 1, 2, 4, 3]> (k5)",
                                   "k4 = Transpose <perm = [0, 1, 3, 2]> (k) kt = Unsqueeze (k4, two)"])  # fmt: skip
@pytest.mark.parametrize("mask", ["B, 1, 1, S, T", "1, 1, S, T", "S, T"])
def test_heads_by_group(heads: str, mask: str) -> None:
    """Q [B, Hkv, G, S, D], with a sink for each head."""
    nodes = f"""
        v5 = Unsqueeze (v, two) {heads} qsh = Shape (q) b = Slice (qsh, zero, one) s1 = Slice (qsh, three, four)
        column = Concat <axis = 0> (b, two, two, s1, one) s5 = Reshape (sink, five) sc = Expand (s5, column)
        a = MatMul (q, kt) m1 = Mul (a, c) x = Add (m1, m) j = Concat <axis = -1> (x, sc) {MAXIMUM}
        p = Softmax <axis = -1> (d) w = Slice (p, zero, last, last) y = MatMul (w, v5)
    """
    inputs = f"float[B, 2, 2, S, 8] q, float[B, 2, T, 8] k, float[B, 2, T, 6] v, float[{mask}] m"
    source = parse_graph(f"({inputs}) => (float[B, 2, 2, S, 6] y) {{ {nodes} }}", 18,
                         {**WEIGHTS, "five": np.array([1, 2, 2, 1, 1])})  # fmt: skip
    node = check_fused(source)
    assert [value.name for value in node.inputs[1:3] if value is not None] == ["k", "v"]


def test_rows_without_keys_give_all_weight_to_the_sink() -> None:
    source = make_model(make_softmax())
    arrays = draw_feeds(source) | {"m": np.full((2, 1, 3, 5), np.finfo(np.float32).min, np.float32)}
    np.testing.assert_array_equal(lowering.compile(source).run(arrays)["y"], 0)
    np.testing.assert_array_equal(run_model(source, arrays)[0], 0)


def test_without_a_sink_the_maximum_is_subtracted_all_the_same() -> None:
    nodes = f"{PLAIN} top = ReduceMax (x, last) d = Sub (x, top) p = Softmax <axis = -1> (d) y = MatMul (p, v4)"
    result = fuse_model(make_model(nodes))
    (node,) = (node for node in result.graph if node.op_type == "Attention")
    assert node.domain == "" and count_operators(result)["ReduceMax"] == 0


@pytest.mark.parametrize(
    "operators, more",
    [
        ({"after": "w = Slice (p, one, end, last) y = MatMul (w, v4)"}, ""),  # the sink stays, the first key is dropped
        ({"sink": "sc = Identity (given)"}, "float[B, 4, S, 1] given"),  # a sink for each row
        ({"sink": "sc = Expand (given, column)"}, "float[1, 4, S, 1] given"),
        ({"joined": "j = Concat <axis = -1> (x, sc, sc)",
          "after": "w = Slice (p, zero, minus, last) y = MatMul (w, v4)"}, ""),
        ({"joined": "j0 = Concat <axis = -1> (x, sc) mp = Pad (m, pads_in_front) j = Add (j0, mp)"}, ""),
        ({"joined": "j0 = Concat <axis = -1> (x, sc) z = Expand (ones, column) j = Add (j0, z)"}, ""),
        ({"joined": "j0 = Concat <axis = -1> (x, sc) j = Mul (j0, negative)"}, ""),
        ({"last": "top = ReduceMax (j, two) d = Sub (j, top)"}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_other_columns_than_sinks_stay(operators: dict[str, Any], more: str) -> None:
    source = make_model(make_softmax(**operators), ", ".join(filter(None, ("float[B, 1, S, T] m", more))), 24)
    source.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-2]), "minus"))
    check_untouched(source)


def test_probabilities_that_are_read_elsewhere_refuse() -> None:
    nodes = make_softmax(after=f"{AFTER} z = ReduceSum (p)")
    text = f"({INPUTS}, float[B, 1, S, T] m) => (float[B, 4, S, 6] y, float[1, 1, 1, 1] z) {{ {REPEATED} {nodes} }}"
    check_untouched(parse_graph(text, 24, WEIGHTS))


def test_a_dumped_model_compiles_again() -> None:
    source = make_model(make_softmax())
    arrays = draw_feeds(source)
    again = lowering.compile(ir.to_proto(fuse_model(source))).run(arrays)["y"]
    np.testing.assert_array_equal(again, lowering.compile(source).run(arrays)["y"])


@pytest.mark.parametrize("sink, error", [("float[3] z", "size|dimension"), ("float[4, 1] z", "rank 2"),
                                         ("float16[4] z", "float16")])  # fmt: skip
def test_sinks_that_do_not_fit_are_refused(sink: str, error: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["" : 24, "onnx_lowering" : 25]> m (float[1, 4, 2, 8] q,
        float[1, 2, 5, 8] k, {sink}) => (float[1, 4, 2, 8] y) {{ y = onnx_lowering.Attention (q, k, k, , , , , z) }}"""
    with pytest.raises(lowering.NodeError, match=error):
        lowering.compile(onnx.parser.parse_model(text))
