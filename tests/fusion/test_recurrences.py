"""Convolutions with a state and linear attention, written out: one operator each, of the same results."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import feeds, fused, operators, parse, run, untouched

import lowering

WEIGHTS = {
    "w": np.random.default_rng(0).standard_normal((4, 1, 3)).astype(np.float32),
    "b": np.random.default_rng(1).standard_normal(4).astype(np.float32),
    "start": np.array([0]), "minus": np.array([-2]), "four": np.array([-4]), "one": np.array([-1]),
    "end": np.array([2**63 - 1]), "two": np.array([2]), "number": np.array(2),
}  # fmt: skip


def check(model: onnx.ModelProto, operator: str) -> None:
    """Compiled, with the one operator, it gives what onnxruntime gives of the model as it was written."""
    result = fused(model)
    assert operators(result)[operator] == 1 and not {"Scan", "Conv", "Slice"} & {*operators(result)}
    assert [value.name for value in result.graph.outputs] == [value.name for value in model.graph.output]
    inputs = feeds(model)
    for found, expected in zip(lowering.compile(model)(**inputs).values(), run(model, inputs)):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def convolution(last: str, conv: str = "<group = 4> (j, w, b)", reach: int = 2) -> onnx.ModelProto:
    return parse(
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
    check(convolution(last), "CausalConvWithState")


def test_stateful_conv_with_dilation() -> None:
    model = convolution("present = Slice (j, four, end, two)", "<group = 4, dilations = [2]> (j, w)", 4)
    check(model, "CausalConvWithState")


@pytest.mark.parametrize(
    ("last", "conv"),
    [
        ("present = Slice (j, start, two, two)", "<group = 4> (j, w, b)"),  # the first places
        ("present = Slice (j, minus, end, two)", "<group = 4, pads = [1, 1]> (j, w, b)"),
        ("present = Slice (j, minus, end, two)", "<group = 4, strides = [2]> (j, w, b)"),
        ("present = Slice (j, minus, end, two) z = ReduceSum <keepdims = 0> (j)", "<group = 4> (j, w, b)"),
        ("r = Slice (j, minus, end, two) present = Relu (r)", "<group = 4> (j, w, b)"),
    ],
)
def test_other_convolutions_stay(last: str, conv: str) -> None:
    model = convolution(last, conv)
    if "z = " in last:
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, []))
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    untouched(model)


BODY = {
    "linear": ("vr = Unsqueeze (v, rows)", ""),
    "gated": ("g1 = Unsqueeze (g, columns) e = Exp (g1) kept = Mul (e, s) vr = Unsqueeze (v, rows)", "g"),
    "gated_delta": (
        """g1 = Unsqueeze (g, columns) e = Exp (g1) kept = Mul (s, e) kr = Unsqueeze (k, rows) m = MatMul (kr, kept)
           r = Squeeze (m, rows) d = Sub (v, r) b1 = Unsqueeze (beta, columns) u = Mul (d, b1)
           vr = Unsqueeze (u, rows)""",
        "g beta",
    ),
}


def scan(rule: str, gates: int = 1, attributes: str = "", seen: str = "n", dtype: str = "float") -> onnx.ModelProto:
    """2 heads, keys of 3 and values of 5 elements; rows of tokens are turned for the Scan, and back."""
    steps, more = BODY[rule]
    shapes = {"q": "2, 3", "k": "2, 3", "v": "2, 5", "g": f"2, {gates}", "beta": "2"}
    names = ["q", "k", "v", *more.split()]
    turns = {"q": "[1, 0, 2, 3]", "k": "[1, 0, 2, 3]", "v": "[1, 0, 2, 3]", "g": "[1, 0, 2, 3]", "beta": "[1, 0, 2]"}
    inputs = ", ".join(f"float[B, T, {shapes[name]}] {name}_rows" for name in names)
    turned = " ".join(f"{name}_turned = Transpose <perm = {turns[name]}> ({name}_rows)" for name in names)
    within = ", ".join(f"float[B, {shapes[name]}] {name}" for name in names)
    kept = "s" if rule == "linear" else "kept"
    body = f"""step (float[B, 2, 3, 5] s, {within}) => (float[B, 2, 3, 5] n, float[B, 2, 5] o) {{
        rows = Constant <value_ints = [-2]> () columns = Constant <value_ints = [-1]> () {steps}
        kc = Unsqueeze (k, columns) a = MatMul (kc, vr) n = Add ({kept}, a) qr = Unsqueeze (q, rows)
        w = MatMul (qr, {seen}) o = Squeeze (w, rows) }}"""
    given = ", ".join(f"{name}_turned" for name in names)
    text = f"""(float[B, 2, 3, 5] state, {inputs}) => (float[B, 2, 3, 5] present, float[B, T, 2, 5] y) {{ {turned}
            present, all = Scan <num_scan_inputs = {len(names)}, body = {body} {attributes}> (state, {given})
            y = Transpose <perm = [1, 0, 2, 3]> (all) }}"""
    return parse(text.replace("float[", f"{dtype}["), 24)


@pytest.mark.parametrize(("rule", "gates"), [("linear", 1), ("gated", 3), ("gated_delta", 1)])
def test_linear_attention(rule: str, gates: int) -> None:
    """Cases 1 to 4: decays by head and by element."""
    check(scan(rule, gates), "LinearAttention")


@pytest.mark.parametrize(
    "model",
    [
        scan("gated", attributes=", scan_input_directions = [1, 1, 1, 1]"),
        scan("gated", seen="kept"),  # of the state before the token
        scan("gated", dtype="double"),
    ],
)
def test_other_scans_stay(model: onnx.ModelProto) -> None:
    assert operators(fused(model))["Scan"] == 1
