"""Element-wise graphs on NaN, infinities, both zeros, subnormals and the largest numbers: as NumPy has them."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 1e-40, -1e-40, 3e38, -3e38]
CONSTANTS = [0.0, -0.0, 1.0, -1.0, 2.0, np.inf, 3e38, 1e-40]
BINARY: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum, "Min": np.minimum,
}  # fmt: skip
UNARY: dict[str, Callable[..., np.ndarray]] = {"Neg": np.negative, "Abs": np.abs, "Reciprocal": lambda x: 1 / x}
CONDITIONS: dict[str, Callable[..., np.ndarray]] = {
    "Less": np.less, "Equal": np.equal, "GreaterOrEqual": np.greater_equal, "LessOrEqual": np.less_equal,
}  # fmt: skip


class Graph:
    """A random graph, which computes by NumPy as it grows. All values are outputs, or the last one alone."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.draw, self.dtype = random.Random(seed), np.dtype(dtype)
        self.nodes: list[onnx.NodeProto] = []
        grid = np.array(SPECIAL).astype(dtype)
        self.values = {"x": np.repeat(grid, len(grid)), "y": np.tile(grid, len(grid))}
        self.feeds, self.constants = dict(self.values), dict[str, np.ndarray]()

    def operand(self) -> str:
        if self.draw.random() < 0.4:
            name = f"c{len(self.constants)}"
            self.constants[name] = np.array(self.draw.choice(CONSTANTS)).astype(self.dtype)
            return name
        return self.draw.choice(list(self.values))

    def value(self, name: str) -> np.ndarray:
        return self.constants[name] if name in self.constants else self.values[name]

    def add(self, operator: str, inputs: list[str], result: np.ndarray) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name]))
        self.values[name] = np.asarray(result)
        return name

    def grow(self) -> str:
        operand = self.draw.choice(list(self.values))
        inputs = [operand, self.operand()]
        self.draw.shuffle(inputs)
        kind = self.draw.choice(("binary", "binary", "unary", "where"))
        if kind == "unary":
            operator = self.draw.choice(list(UNARY))
            return self.add(operator, [operand], UNARY[operator](self.value(operand)))
        if kind == "binary":
            operator = self.draw.choice(list(BINARY))
            a, b = map(self.value, inputs)
            if operator in ("Max", "Min") and ((a == 0) & (b == 0) & (np.signbit(a) != np.signbit(b))).any():
                return self.grow()  # of zeros of both signs either may be the result
            return self.add(operator, inputs, BINARY[operator](*map(self.value, inputs)))
        operator = self.draw.choice(list(CONDITIONS))
        condition = self.add(operator, inputs, CONDITIONS[operator](*map(self.value, inputs)))
        selected = self.values.pop(condition)
        if self.draw.random() < 0.5:
            condition, selected = self.add("Not", [condition], ~selected), ~selected
            self.values.pop(condition)
        operands = [operand, self.draw.choice(list(self.values))]
        return self.add("Where", [condition, *operands], np.where(selected, *map(self.value, operands)))

    def model(self, outputs: list[str]) -> onnx.ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        infos = [helper.make_tensor_value_info(name, kind, ["n"]) for name in ("x", "y", *outputs)]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", infos[:2], infos[2:], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("seed", range(6))
def test_random_graphs_are_as_numpy_has_them(seed: int, dtype: str) -> None:
    with np.errstate(all="ignore"):
        graph = Graph(seed, dtype)
        for _ in range(12):
            last = graph.grow()
    for outputs in ([last], [node.output[0] for node in graph.nodes if node.output[0] in graph.values]):
        results = lowering.compile(graph.model(outputs)).run(graph.feeds)
        for name in outputs:
            want = np.broadcast_to(graph.values[name], graph.feeds["x"].shape)
            np.testing.assert_array_equal(results[name], want, err_msg=name)
            numbers = ~np.isnan(want)
            np.testing.assert_array_equal(np.signbit(results[name][numbers]), np.signbit(want[numbers]), err_msg=name)
