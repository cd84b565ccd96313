"""Inputs and outputs that do not declare a shape or a type, and the opset that errors name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lowering
from tests.support.error_codes import raises

W = "<float[3, 4] w = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}>"

OUTPUTS = {
    "the shape of an input": "m (float[2, 3] x) => (float[2, 3] y) { y = Relu (x) }",
    "turned": "m (float[N, 3] x) => (float[3, N] y) { a = Exp (x) y = Transpose (a) }",
    "of another type": "m (float[N, 3] x) => (int64[2] y) { y = Shape (x) }",
    "a matmul": f"m (float[N, 3] x) => (float[N, 4] y) {W} {{ y = MatMul (x, w) }}",
    "of numbers alone": "m (float[N, 3] x) => (int64[2] y) { y = Constant <value_ints = [1, 0]> () }",
    "of a size that data decides": "m (float[N, 3] x) => (int64[A, B] y) { y = NonZero (x) }",
    "of a body": """m (float[N, 3] x) => (float[N, 3] y) { t = Constant <value_int = 3> ()
        y = Loop (t, , x) <body = b (int64 i, bool go, float[N, 3] a) => (bool g, float[N, 3] c) {
            g = Identity (go) c = Sin (a) }> }""",
}


def model(body: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {body}')


def check_equal(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    references = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)
    for actual, expected in zip(lowering.compile(proto).run(feeds).values(), references, strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lacks", ["shape", "type", "element type"])
@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_declare_less(case: str, lacks: str) -> None:
    proto = model(OUTPUTS[case])
    (output,) = proto.graph.output
    if lacks == "type":
        output.ClearField("type")
    elif lacks == "shape":
        output.type.tensor_type.ClearField("shape")
    else:
        output.type.tensor_type.elem_type = 0
        output.type.tensor_type.ClearField("shape")
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    if lacks == "element type":  # onnxruntime refuses it
        assert lowering.check(proto).ok
    else:
        check_equal(proto, {"x": x})


def test_files_with_weights_next_to_them(tmp_path: Path) -> None:
    proto = model("m (float[N, 32] x) => (float[N, 32] y) { y = MatMul (x, w) }")
    w = np.random.default_rng(1).standard_normal((32, 32)).astype(np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(w, "w"))
    proto.graph.output[0].ClearField("type")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.node.append(helper.make_node("Gemm", ["x", "w"], ["z"]))
    proto.graph.output.append(onnx.ValueInfoProto(name="z"))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    x = np.random.default_rng(2).standard_normal((3, 32)).astype(np.float32)
    results = lowering.compile(path).run({"x": x})
    for name in "yz":
        np.testing.assert_allclose(results[name], x.astype(np.float64) @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (f"m (float[A] x) => (float[A, B] y) {W} {{ y = Gemm (x, w) }}", (2, 3)),
        (f"m (float[A] x) => (float[A, B, C] y) {W} {{ y = MatMul (x, w) }}", (2, 5, 3)),
        ("m (float[A] x) => (float[A] y) { n = Neg (x) y = Transpose <perm = [2, 0, 1]> (n) }", (2, 3, 4)),
        ("m (float[A] x) => (float[A] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }", (1, 2, 4, 4)),
        ("m (float[A] x, float[2, 3] z) => (float[A] y) { e = Exp (x) y = Concat <axis = 0> (e, z) }", (4, 3)),
        ("m (float[A] x) => (float[A] y) <int64[4] p = {0, 1, 0, 1}> { y = Pad (x, p) }", (2, 3)),
    ],
)
def test_inputs_whose_uses_tell_their_rank(body: str, shape: tuple[int, ...]) -> None:
    proto = model(body)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    if len(proto.graph.output[0].type.tensor_type.shape.dim) == 1:
        proto.graph.output[0].type.tensor_type.ClearField("shape")
    rng = np.random.default_rng(3)
    feeds = {"x": rng.standard_normal(shape).astype(np.float32)}
    if len(proto.graph.input) > 1:
        feeds["z"] = rng.standard_normal((2, 3)).astype(np.float32)
    check_equal(proto, feeds)


def test_sizes_of_inputs_without_a_shape() -> None:
    """They have names, and `dims` gives them numbers."""
    proto = model("m (float[A] x) => (float[A, B] y) { y = Softmax (x) }")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    module = lowering.compile(proto, dims={"x_1": 3})
    assert module.inputs[0].dims == ("x_0", 3)


def test_rank_that_nothing_tells() -> None:
    proto = model(f"m (float[A] x) => (float[A] y) {W} {{ y = MatMul (x, w) }}")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    with raises("model.input_shape_missing"):
        lowering.compile(proto)


GELU = """m (float[N, 4] x) => (float[A, B] y) { half = Constant <value_float = 0.5> ()
    one = Constant <value_float = 1.0> () root = Constant <value_float = 1.4142135> ()
    a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, c) e = Mul (d, half) NODE }"""


@pytest.mark.parametrize("opset", [13, 17, 21, 24])
@pytest.mark.parametrize(
    ("node", "operator"),
    [
        ("[bad] y = Concat <axis = 5> (e, x)", "Concat"),
        ("[bad] y = Transpose <perm = [0, 5]> (e)", "Transpose"),
        ("[bad] y = Gather <axis = 7> (e, one)", "Gather"),
    ],
)
def test_errors_name_the_declared_opset(node: str, operator: str, opset: int) -> None:
    """Also where patterns are fused, for which the model is brought to a newer one."""
    with pytest.raises(lowering.NodeError, match=f"ai.onnx.{operator}-{opset} 'bad'"):
        lowering.compile(model(GELU.replace("NODE", node), opset))
