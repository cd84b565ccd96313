"""Models in the forms that exporters of many years left them: opsets 11 to 25, initializers that nobody reads or that
are twice the same, names of any characters, half precision with islands of float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup

HIDDEN = 6


def attention_block(opset: int) -> onnx.ModelProto:
    """Causal attention of x [B, S, 2 * HIDDEN] split into Q = V and K, then a normalization: operators that changed how
    they take axes, splits and lengths between the opsets 11 and 25, each as its version has it."""
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(values: object, dtype: str = "int64") -> str:
        constants.append(numpy_helper.from_array(np.array(values, dtype), f"c{len(constants)}"))
        return constants[-1].name

    def node(operator: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"v{len(nodes)}_{k}" for k in range(outputs)]
        nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0]

    def with_axes(operator: str, since: int, data: str, axes: list[int], **attributes: object) -> str:
        """An operator whose axes became an input in opset `since`."""
        if opset >= since:
            return node(operator, data, constant(axes), **attributes)
        return node(operator, data, axes=axes, **attributes)

    if opset >= 18:
        q = node("Split", "x", outputs=2, axis=-1, num_outputs=2)
    elif opset >= 13:
        q = node("Split", "x", constant([HIDDEN, HIDDEN]), outputs=2, axis=-1)
    else:
        q = node("Split", "x", outputs=2, axis=-1, split=[HIDDEN, HIDDEN])
    k = q.replace("_0", "_1")
    if opset >= 15:
        tokens = node("Squeeze", node("Shape", "x", start=1, end=2), *[constant([0])])
    else:
        tokens = with_axes("Squeeze", 13, node("Gather", node("Shape", "x"), constant([1])), [0])
    positions = node("Range", constant(0), tokens, constant(1))
    rows, columns = (with_axes("Unsqueeze", 13, positions, [axis]) for axis in (1, 0))
    visible = node("Not", node("Less", rows, columns))
    scores = node("MatMul", q, node("Transpose", k, perm=[0, 2, 1]))
    masked = node("Where", visible, scores, constant(-np.inf, "float32"))
    attended = node("MatMul", node("Softmax", masked, axis=2), q)
    mean = with_axes("ReduceMean", 18, attended, [-1], keepdims=1)
    centered = node("Sub", attended, mean)
    squares = with_axes("ReduceSum", 13, node("Mul", centered, centered), [-1], keepdims=1)
    bounded = node("Clip", squares, constant(0.5, "float32"))
    nodes.append(helper.make_node("Div", [centered, node("Sqrt", bounded)], ["y"]))
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", 2 * HIDDEN])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "tokens", HIDDEN])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6 if opset < 13 else 10)


def test_every_opset_is_imported() -> None:
    for opset in range(11, 26):
        assert import_model(load_model(attention_block(opset)), lookup).outputs[0].name == "y"


@pytest.mark.parametrize("opset", [11, 13, 15, 18, 25])  # those at which the block changes, and the last
def test_opset(opset: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 2 * HIDDEN)).astype(np.float32)
    q, k = np.split(x.astype(np.float64), 2, axis=-1)
    scores = np.where(np.tri(5, dtype=bool), q @ k.transpose(0, 2, 1), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    attended = p / p.sum(-1, keepdims=True) @ q
    centered = attended - attended.mean(-1, keepdims=True)
    expected = centered / np.sqrt(np.maximum((centered**2).sum(-1, keepdims=True), 0.5))
    actual = lowering.compile(attention_block(opset)).run({"x": x})["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_initializers_listed_as_inputs_as_old_files_must() -> None:
    model = onnx.parser.parse_model("""<ir_version: 3, opset_import: ["" : 11]>
        m (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {2.0, 3.0}> { y = Mul (x, w) }""")
    module = lowering.compile(model)
    assert [t.name for t in module.inputs] == ["x"]
    np.testing.assert_array_equal(module.run({"x": np.ones((3, 2), np.float32)})["y"], [[2, 3]] * 3)


def test_unused_and_duplicate_initializers_are_stored_once_or_never() -> None:
    rng = np.random.default_rng(0)
    w, other = rng.standard_normal((2, 16, 16)).astype(np.float32)
    other[:-1] = w[:-1]  # differ in their last rows only
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 24]>
        m (float[N, 16] x) => (float[N, 16] y) {
          a = MatMul (x, w) b = MatMul (a, same) y = MatMul (b, other)
        }""")
    for name, array in {"w": w, "same": w, "other": other, "unused": rng.standard_normal((64, 64))}.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    assert [a.shape for a in import_model(load_model(model), lookup).weights.values()] == [(16, 16), (16, 16)]
    x = rng.standard_normal((3, 16)).astype(np.float32)
    actual = lowering.compile(model).run({"x": x})["y"]
    np.testing.assert_allclose(actual, x.astype(np.float64) @ w @ w @ other, rtol=1e-4, atol=1e-4)


def test_names_of_any_characters(tmp_path: Path) -> None:
    """Names that meet when their odd characters are replaced stay apart, down to the artifact and the C++ header."""
    names = ['a "b"', "a.b", "a_b", "2 * n\\n", "größe/é:0", "int"]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [f"{n} dim", 2]) for n in names]
    nodes = [helper.make_node("Mul", [n, "w eight;"], [f"{n} -> y"], name=f"{n} node") for n in names]
    outputs = [helper.make_tensor_value_info(f"{n} -> y", TensorProto.FLOAT, [f"{n} dim", 2]) for n in names]
    weight = numpy_helper.from_array(np.array([2, -1], np.float32), "w eight;")
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    lowering.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)).save(
        tmp_path / "out"
    )
    module = lowering.load(tmp_path / "out")
    feeds = {n: np.full((k + 1, 2), k + 1, np.float32) for k, n in enumerate(names)}
    results = module.run(feeds)
    for n in names:
        np.testing.assert_array_equal(results[f"{n} -> y"], feeds[n] * [2, -1])


def test_half_precision_with_islands_of_float32() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 17]>
        m (float16[N, 24] x, float16[24, 24] w) => (float16[N, 24] y) <float[24] scale> {
          wide = Cast <to = 1> (x)
          normal = LayerNormalization <epsilon = 1e-5> (wide, scale)
          narrow = Cast <to = 10> (normal)
          scores = MatMul (narrow, w)
          wide_scores = Cast <to = 1> (scores)
          wide_p = Softmax <axis = -1> (wide_scores)
          p = Cast <to = 10> (wide_p)
          y = Add (p, x)
        }""")
    rng = np.random.default_rng(0)
    model.graph.initializer.append(numpy_helper.from_array(rng.uniform(0.5, 2, 24).astype(np.float32), "scale"))
    # Squares that leave the range of float16 are why the island is there.
    x = (300 * rng.standard_normal((5, 24))).astype(np.float16)
    w = rng.standard_normal((24, 24)).astype(np.float16)
    wide = x.astype(np.float64)
    normal = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    scores = normal * numpy_helper.to_array(model.graph.initializer[0]) @ w
    p = np.exp(scores - scores.max(-1, keepdims=True))
    actual = lowering.compile(model).run({"x": x, "w": w})["y"]
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, p / p.sum(-1, keepdims=True) + wide, rtol=2e-3, atol=2e-2)
