"""Convolutions with a state and linear attention, written out, become one operator each with the same results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import lowering
from tests.fusion.graphs import check_untouched, count_operators, draw_feeds, fuse_model, parse_graph, run_model

WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((4, 1, 3)).astype(np.float32),
    "b": np.random.default_rng(1).standard_normal(4).astype(np.float32),
    "start": np.array([0]), "minus": np.array([-2]), "four": np.array([-4]), "one": np.array([-1]),
    "end": np.array([2**63 - 1]), "two": np.array([2]), "number": np.array(2),
}  # fmt: skip


def check_fused(model: onnx.ModelProto, operator: str) -> None:
    """Check that the compiled model has the operator and matches onnxruntime on the model as written."""
    result = fuse_model(model)
    assert count_operators(result)[operator] == 1 and not {"Scan", "Conv", "Slice"} & {*count_operators(result)}
    assert [value.name for value in result.graph.outputs] == [value.name for value in model.graph.output]
    inputs = draw_feeds(model)
    for actual, expected in zip(lowering.compile(model)(**inputs).values(), run_model(model, inputs)):
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-5)


def make_convolution(last: str, conv: str = "<group = 4> (j, w, b)", reach: int = 2) -> onnx.ModelProto:
    return parse_graph(
        f"""(float[B, 4, {reach}] state, float[B, 4, S] x) => (float[B, 4, S] y, float[B, 4, {reach}] present) {{
            j = Concat <axis = 2> (state, x) y = Conv {conv} {last} }}""",
        24,
        WEIGHTS,
    )


@pytest.mark.parametrize(
    "last",
    [
        "present = Slice (j, minus, end, two)",
        "n = Shape <start = 2, end = 3> (j) s = Sub (n, two) present = Slice (j, s, n, two)",
        """d = Shape (j) l = Gather <axis = 0> (d, number) k = Sub (l, number) s = Reshape (k, one)
           e = Unsqueeze (l, start) present = Slice (j, s, e, one)""",
    ],
)
def test_stateful_conv(last: str) -> None:
    """Cases 1 and 2."""
    check_fused(make_convolution(last), "CausalConvWithState")


def test_stateful_conv_with_dilation() -> None:
    model = make_convolution("present = Slice (j, four, end, two)", "<group = 4, dilations = [2]> (j, w)", 4)
    check_fused(model, "CausalConvWithState")


@pytest.mark.parametrize(
    ("last", "conv"),
    [
        ("present = Slice (j, start, two, two)", "<group = 4> (j, w, b)"),  # the first positions
        ("present = Slice (j, minus, end, two)", "<group = 4, pads = [1, 1]> (j, w, b)"),
        ("present = Slice (j, minus, end, two)", "<group = 4, strides = [2]> (j, w, b)"),
        ("present = Slice (j, minus, end, two) z = ReduceSum <keepdims = 0> (j)", "<group = 4> (j, w, b)"),
        ("r = Slice (j, minus, end, two) present = Relu (r)", "<group = 4> (j, w, b)"),
    ],
)
def test_other_convolutions_stay(last: str, conv: str) -> None:
    model = make_convolution(last, conv)
    if "z = " in last:
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, []))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    check_untouched(model)


BODY = {
    "linear": ("vr = Unsqueeze (v, rows)", ""),
    "gated": ("g1 = Unsqueeze (g, columns) e = Exp (g1) decayed = Mul (e, s) vr = Unsqueeze (v, rows)", "g"),
    "gated_delta": (
        """g1 = Unsqueeze (g, columns) e = Exp (g1) decayed = Mul (s, e) kr = Unsqueeze (k, rows)
           m = MatMul (kr, decayed) r = Squeeze (m, rows) d = Sub (v, r) b1 = Unsqueeze (beta, columns) u = Mul (d, b1)
           vr = Unsqueeze (u, rows)""",
        "g beta",
    ),
}


def make_scan(
    rule: str, gates: int = 1, attributes: str = "", seen: str = "n", dtype: str = "float"
) -> onnx.ModelProto:
    """Return a Scan: 2 heads, keys of 3 and values of 5 elements; rows of tokens are transposed before and after."""
    steps, more = BODY[rule]
    shapes = {"q": "2, 3", "k": "2, 3", "v": "2, 5", "g": f"2, {gates}", "beta": "2"}
    names = ["q", "k", "v", *more.split()]
    permutations = {
        "q": "[1, 0, 2, 3]",
        "k": "[1, 0, 2, 3]",
        "v": "[1, 0, 2, 3]",
        "g": "[1, 0, 2, 3]",
        "beta": "[1, 0, 2]",
    }
    inputs = ", ".join(f"float[B, T, {shapes[name]}] {name}_rows" for name in names)
    transposes = " ".join(f"{name}_turned = Transpose <perm = {permutations[name]}> ({name}_rows)" for name in names)
    within = ", ".join(f"float[B, {shapes[name]}] {name}" for name in names)
    decayed_state = "s" if rule == "linear" else "decayed"
    body = f"""step (float[B, 2, 3, 5] s, {within}) => (float[B, 2, 3, 5] n, float[B, 2, 5] o) {{
        rows = Constant <value_ints = [-2]> () columns = Constant <value_ints = [-1]> () {steps}
        kc = Unsqueeze (k, columns) a = MatMul (kc, vr) n = Add ({decayed_state}, a) qr = Unsqueeze (q, rows)
        w = MatMul (qr, {seen}) o = Squeeze (w, rows) }}"""
    scan_inputs = ", ".join(f"{name}_turned" for name in names)
    text = f"""(float[B, 2, 3, 5] state, {inputs}) => (float[B, 2, 3, 5] present, float[B, T, 2, 5] y) {{ {transposes}
            present, all = Scan <num_scan_inputs = {len(names)}, body = {body} {attributes}> (state, {scan_inputs})
            y = Transpose <perm = [1, 0, 2, 3]> (all) }}"""
    return parse_graph(text.replace("float[", f"{dtype}["), 24)


@pytest.mark.parametrize(("rule", "gates"), [("linear", 1), ("gated", 3), ("gated_delta", 1)])
def test_linear_attention(rule: str, gates: int) -> None:
    """Cases 1 to 4: decays by head and by element."""
    check_fused(make_scan(rule, gates), "LinearAttention")


@pytest.mark.parametrize(
    "model",
    [
        make_scan("gated", attributes=", scan_input_directions = [1, 1, 1, 1]"),
        make_scan("gated", seen="decayed"),  # reads the state before the token
        make_scan("gated", dtype="double"),
    ],
)
def test_other_scans_stay(model: onnx.ModelProto) -> None:
    assert count_operators(fuse_model(model))["Scan"] == 1
