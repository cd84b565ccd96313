"""Functions that differ only in float constants share their code; constants that choose the code stay in it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering

TYPES = {
    TensorProto.FLOAT: (np.float32, 1e-5),
    TensorProto.FLOAT16: (np.float16, 4e-3),
    TensorProto.BFLOAT16: (ml_dtypes.bfloat16, 3e-2),
}


def make_model(layers: list[list[onnx.NodeProto]], constants: dict[str, float], kind: int) -> onnx.ModelProto:
    """Return a model of layers that map values "x0", "x1", ... of the shape [rows, 24] to one another."""
    weights = [numpy_helper.from_array(np.asarray(c, TYPES[kind][0]), name) for name, c in constants.items()]
    weights.append(numpy_helper.from_array((np.eye(24) / 2 + 0.01).astype(TYPES[kind][0]), "w"))
    x = helper.make_tensor_value_info("x0", kind, ["rows", 24])
    y = helper.make_tensor_value_info(f"x{len(layers)}", kind, ["rows", 24])
    graph = helper.make_graph([node for layer in layers for node in layer], "layers", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def scale_and_clip(scales: list[float], kind: int) -> onnx.ModelProto:
    """Layers of max(x w * scale - 1.5 * scale, scale / 8), with a scale each."""
    constants, layers = {}, []
    for n, scale in enumerate(scales):
        constants |= {f"scale{n}": scale, f"offset{n}": 1.5 * scale, f"least{n}": scale / 8}
        layers.append(
            [
                helper.make_node("MatMul", [f"x{n}", "w"], [f"m{n}"]),
                helper.make_node("Mul", [f"m{n}", f"scale{n}"], [f"s{n}"]),
                helper.make_node("Sub", [f"s{n}", f"offset{n}"], [f"t{n}"]),
                helper.make_node("Max", [f"t{n}", f"least{n}"], [f"x{n + 1}"]),
            ]
        )
    return make_model(layers, constants, kind)


def apply_operator(operator: str, values: list[float]) -> onnx.ModelProto:
    """Layers of x operator value."""
    nodes = [[helper.make_node(operator, [f"x{n}", f"c{n}"], [f"x{n + 1}"])] for n in range(len(values))]
    return make_model(nodes, {f"c{n}": value for n, value in enumerate(values)}, TensorProto.FLOAT)


def count_kernels(model: onnx.ModelProto) -> int:
    return len(lowering.compile(model).manifest.kernels)


@pytest.mark.parametrize("kind", TYPES)
def test_layers_with_a_scale_each_share_kernels(kind: int) -> None:
    dtype, tolerance = TYPES[kind]
    scales = [0.5, 1.25, -0.75, 1.25, 2.0]
    model = lowering.compile(scale_and_clip(scales, kind))
    assert len(model.manifest.kernels) == count_kernels(scale_and_clip(scales[:1], kind))
    x = np.random.default_rng(0).standard_normal((7, 24)).astype(dtype)
    expected = x.astype(np.float64)
    weight = (np.eye(24) / 2 + 0.01).astype(dtype).astype(np.float64)
    for scale in scales:
        expected = np.maximum(expected @ weight * scale - 1.5 * scale, scale / 8)
    (actual,) = model.run({"x0": x}).values()
    error = np.abs(actual.astype(np.float64) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("operator, values", [("Pow", [2.0, 3.0, 0.5]), ("Div", [2.0, 4.0, 8.0])])
def test_constants_that_choose_the_code_stay(operator: str, values: list[float]) -> None:
    model = apply_operator(operator, values)
    compiled = lowering.compile(model)
    x = np.random.default_rng(1).uniform(0.5, 2, (5, 24)).astype(np.float32)
    expected = x.astype(np.float64)
    for value in values:
        expected = expected**value if operator == "Pow" else expected / value
    (actual,) = compiled.run({"x0": x}).values()
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_infinity_and_zeros_keep_their_meaning() -> None:
    """x * 0 is NaN where x is not finite, whether 0 is in the code or an argument; -0.0 is not 0.0."""
    constants = [0.0, -0.0, 2.0]
    layers = [
        [
            helper.make_node("Mul", ["x0", f"c{n}"], [f"p{n}"]),
            helper.make_node("MatMul", [f"p{n}", "w"], [f"q{n}"]),
        ]
        for n in range(3)
    ]
    layers[2] += [helper.make_node("Concat", ["p0", "p1", "p2"], ["x3"], axis=0)]
    model = make_model(layers, {f"c{n}": value for n, value in enumerate(constants)}, TensorProto.FLOAT)
    x = np.random.default_rng(2).standard_normal((2, 24)).astype(np.float32)
    x[0, :3] = np.inf, -np.inf, np.nan
    (actual,) = lowering.compile(model).run({"x0": x}).values()
    with np.errstate(invalid="ignore"):
        expected = np.concatenate([x * np.float32(value) for value in constants])
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[3]), np.signbit(expected[3]))


def test_dynamic_quantization_compiles_one_layer() -> None:
    """DynamicQuantizeLinear and MatMulInteger with a weight and a scale of each layer."""

    def layers(count: int) -> onnx.ModelProto:
        rng, nodes, weights = np.random.default_rng(3), [], []
        for n in range(count):
            weights += [
                numpy_helper.from_array(rng.integers(-127, 128, (32, 32), dtype=np.int8), f"w{n}"),
                numpy_helper.from_array(np.float32(0.003 + 0.001 * n), f"s{n}"),
            ]
            nodes += [
                helper.make_node("DynamicQuantizeLinear", [f"x{n}"], [f"q{n}", f"qs{n}", f"z{n}"]),
                helper.make_node("MatMulInteger", [f"q{n}", f"w{n}", f"z{n}"], [f"m{n}"]),
                helper.make_node("Cast", [f"m{n}"], [f"c{n}"], to=TensorProto.FLOAT),
                helper.make_node("Mul", [f"qs{n}", f"s{n}"], [f"t{n}"]),
                helper.make_node("Mul", [f"c{n}", f"t{n}"], [f"x{n + 1}"]),
            ]
        x = helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["rows", 32])
        y = helper.make_tensor_value_info(f"x{count}", TensorProto.FLOAT, ["rows", 32])
        graph = helper.make_graph(nodes, "quantized", [x], [y], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)

    few, many = lowering.compile(layers(2)), lowering.compile(layers(6))
    assert len(many.manifest.kernels) <= len(few.manifest.kernels) + 1
    x = np.random.default_rng(4).standard_normal((3, 32)).astype(np.float32)
    (actual,) = many.run({"x0": x}).values()
    (expected,) = onnx.reference.ReferenceEvaluator(layers(6)).run(None, {"x0": x})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_loops_share_kernels_with_the_model() -> None:
    """The body of a loop whose number of steps depends on data is a function of its own."""

    def tensor(name: str, kind: int, *shape: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [
            helper.make_node("Mul", ["v", "half"], ["m"]),
            helper.make_node("MatMul", ["m", "w"], ["u"]),
            helper.make_node("Identity", ["keep"], ["go"]),
        ],
        "body",
        [tensor("step", TensorProto.INT64), tensor("keep", TensorProto.BOOL), tensor("v", TensorProto.FLOAT, 4, 24)],
        [tensor("go", TensorProto.BOOL), tensor("u", TensorProto.FLOAT, 4, 24)],
    )
    nodes = [
        helper.make_node("Mul", ["x", "third"], ["a"]),
        helper.make_node("Loop", ["steps", "", "a"], ["b"], body=body),
        helper.make_node("Mul", ["x", "half"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["y"]),
    ]
    weights = {"half": np.float32(0.5), "third": np.float32(1 / 3), "w": np.eye(24, dtype=np.float32)}
    inputs = [tensor("x", TensorProto.FLOAT, 4, 24), tensor("steps", TensorProto.INT64)]
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    outputs = [tensor(name, TensorProto.FLOAT, 4, 24) for name in ("b", "y")]
    graph = helper.make_graph(nodes, "loop", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    compiled = lowering.compile(model)
    x = np.random.default_rng(5).standard_normal((4, 24)).astype(np.float32)
    for steps in (0, 1, 3):
        actual = compiled.run({"x": x, "steps": np.asarray(steps)})
        np.testing.assert_allclose(actual["b"], x / 3 * 0.5**steps, rtol=1e-6)
        np.testing.assert_allclose(actual["y"], x * 0.5, rtol=1e-6)
