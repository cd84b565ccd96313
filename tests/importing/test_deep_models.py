"""Models that are long, wide or nested: what a computer has memory for compiles, and what has a bound says so."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.support.error_codes import raises

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def model(
    nodes: list[onnx.NodeProto], inputs: dict[str, list], outputs: dict[str, list], weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value(name, FLOAT, dims) for name, dims in inputs.items()],
        [value(name, FLOAT, dims) for name, dims in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def chain(length: int) -> onnx.ModelProto:
    """Tanh of x + w, again and again: expensive and cheap operators in turn."""
    nodes = []
    for k in range(length):
        if k % 2:
            nodes.append(helper.make_node("Tanh", [f"v{k}"], [f"v{k + 1}"], name=f"n{k}"))
        else:
            nodes.append(helper.make_node("Add", [f"v{k}", "w"], [f"v{k + 1}"], name=f"n{k}"))
    return model(nodes, {"v0": ["N", 4]}, {f"v{length}": ["N", 4]}, {"w": np.array([0.1, -0.2, 0.3, 0.4], np.float32)})


@pytest.mark.parametrize("length", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_chain_of_elementwise_nodes(length: int) -> None:
    module = lowering.compile(chain(length))
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    expected, w = x.astype(np.float64), np.array([0.1, -0.2, 0.3, 0.4])
    for k in range(length):
        expected = np.tanh(expected) if k % 2 else expected + w
    np.testing.assert_allclose(module.run({"v0": x})[f"v{length}"], expected, rtol=1e-4, atol=1e-5)


def sizes(length: int) -> onnx.ModelProto:
    """A chain of integer nodes from a shape: to a size of the output, which is below 7."""
    nodes = [helper.make_node("Shape", ["x"], ["s0"], start=0, end=1)]
    for k in range(length):
        operator = ("Add", "Div", "Mul", "Sub")[k % 4]
        nodes.append(helper.make_node(operator, [f"s{k}", operator], [f"s{k + 1}"], name=f"n{k}"))
    nodes.append(helper.make_node("Mod", [f"s{length}", "Mod"], ["size"]))
    nodes.append(helper.make_node("ConstantOfShape", ["size"], ["y"]))
    constants = {"Add": 3, "Div": 2, "Mul": 2, "Sub": 1, "Mod": 7}
    return model(nodes, {"x": ["N"]}, {"y": ["M"]}, {name: np.array([c]) for name, c in constants.items()})


@pytest.mark.parametrize("length", [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_a_chain_of_sizes(length: int) -> None:
    module = lowering.compile(sizes(length))
    for n in (0, 5, 1000):
        size = n
        for k in range(length):
            size = (size + 3, size // 2, size * 2, size - 1)[k % 4]
        assert module.run({"x": np.zeros(n, np.float32)})["y"].shape == (size % 7,)


def test_a_chain_of_identities() -> None:
    length = 5000
    nodes = [helper.make_node("Identity", [f"v{k}"], [f"v{k + 1}"], name=f"n{k}") for k in range(length)]
    module = lowering.compile(model(nodes, {"v0": ["N"]}, {f"v{length}": ["N"]}, {}))
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(module.run({"v0": x})[f"v{length}"], x)


@pytest.mark.parametrize("operator", ["Concat", "Sum", "Mean", "Max"])
@pytest.mark.parametrize("width", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_branches(operator: str, width: int) -> None:
    nodes = [helper.make_node("Mul", ["x", f"c{k}"], [f"v{k}"], name=f"n{k}") for k in range(width)]
    attributes = {"axis": 1} if operator == "Concat" else {}
    nodes.append(helper.make_node(operator, [f"v{k}" for k in range(width)], ["y"], **attributes))
    factors = np.random.default_rng(1).standard_normal((width, 1, 1)).astype(np.float32)
    weights = {f"c{k}": f for k, f in enumerate(factors)}
    out = 2 * width if operator == "Concat" else 2
    module = lowering.compile(model(nodes, {"x": ["N", 2]}, {"y": ["N", out]}, weights))
    x = np.random.default_rng(2).standard_normal((3, 2)).astype(np.float32)
    terms = x * factors.astype(np.float64)
    expected = {
        "Concat": lambda: np.concatenate(list(terms), axis=1),
        "Sum": lambda: terms.sum(0),
        "Mean": lambda: terms.mean(0),
        "Max": lambda: terms.max(0),
    }[operator]()
    np.testing.assert_allclose(module.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4 * math.sqrt(width))


def test_a_value_that_is_used_twice_at_every_step() -> None:
    """2^40 paths lead from the output to the input."""
    nodes = [helper.make_node("Mul", [f"v{k}", f"v{k}"], [f"v{k + 1}"]) for k in range(40)]
    nodes.append(helper.make_node("Concat", ["v40", "v0"], ["y"], axis=0))
    module = lowering.compile(model(nodes, {"v0": ["N"]}, {"y": ["M"]}, {}))
    x = np.array([1, -1, 0], np.float32)
    np.testing.assert_array_equal(module.run({"v0": x})["y"], [1, 1, 0, 1, -1, 0])


def nested(depth: int) -> onnx.ModelProto:
    """If inside If: x is doubled in the innermost body."""

    def body(level: int) -> onnx.GraphProto:
        out = [helper.make_tensor_value_info(f"t{level}", FLOAT, ["N"])]
        if level == 0:
            return helper.make_graph([helper.make_node("Add", ["x", "x"], ["t0"])], "g0", [], out)
        no = helper.make_graph(
            [helper.make_node("Neg", ["x"], [f"e{level}"])],
            f"e{level}",
            [],
            [helper.make_tensor_value_info(f"e{level}", FLOAT, ["N"])],
        )
        node = helper.make_node("If", ["c"], [f"t{level}"], then_branch=body(level - 1), else_branch=no)
        return helper.make_graph([node], f"g{level}", [], out)

    graph = body(depth)
    graph.input.extend(
        [helper.make_tensor_value_info("x", FLOAT, ["N"]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def test_nested_bodies() -> None:
    module = lowering.compile(nested(20))
    x = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(module.run({"x": x, "c": np.array(True)})["t20"], [2, 4])
    np.testing.assert_array_equal(module.run({"x": x, "c": np.array(False)})["t20"], [-1, -2])


def with_functions(levels: int, calls: int) -> onnx.ModelProto:
    """Functions of which each calls the one before so often: x + calls ^ levels."""
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("f", 1)]
    add_one = [
        helper.make_node("Constant", [], ["one"], value_float=1.0),
        helper.make_node("Add", ["v0", "one"], ["v1"]),
    ]
    functions = [helper.make_function("f", "F0", ["v0"], ["v1"], add_one, opsets)]
    for level in range(1, levels + 1):
        nodes = [helper.make_node(f"F{level - 1}", [f"v{k}"], [f"v{k + 1}"], domain="f") for k in range(calls)]
        functions.append(helper.make_function("f", f"F{level}", ["v0"], [f"v{calls}"], nodes, opsets))
    proto = model([helper.make_node(f"F{levels}", ["x"], ["y"], domain="f")], {"x": [2]}, {"y": [2]}, {})
    del proto.opset_import[:]
    proto.opset_import.extend(opsets)
    proto.functions.extend(functions)
    return proto


def test_functions_of_functions() -> None:
    module = lowering.compile(with_functions(levels=20, calls=1))
    np.testing.assert_array_equal(module.run({"x": np.zeros(2, np.float32)})["y"], [1, 1])
    module = lowering.compile(with_functions(levels=2, calls=5))
    np.testing.assert_array_equal(module.run({"x": np.zeros(2, np.float32)})["y"], [25, 25])


@pytest.mark.parametrize("levels", [14, 30])
def test_functions_that_are_too_many_nodes(levels: int) -> None:
    with raises("model.node_count_too_large"):
        lowering.compile(with_functions(levels, calls=2))


def test_functions_that_lie_too_deep() -> None:
    with raises("model.nesting_too_deep"):
        lowering.compile(with_functions(40, calls=1))


def test_checking_is_linear_in_nodes() -> None:
    """The number of objects per node that the importer creates does not grow with the model; times are too noisy."""
    bindings = [
        sum(len(block.bindings) for block in import_model(load_model(chain(n)), lookup).module["main"].body.blocks)
        for n in (200, 400, 800)
    ]
    assert bindings[2] - bindings[1] == 2 * (bindings[1] - bindings[0])
