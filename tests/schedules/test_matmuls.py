"""Matmuls among other operators, in every order: gates, residuals, casts, reshapes, splits, static and symbolic."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import lowering
from tests.schedules.random_graphs import BINARY, UNARY

FORMS = {"fixed": (1, 7), "batch fixed": (1, "n"), "one row": ("b", 1), "symbolic": ("b", "n")}
SIZES = {"b": (3, 1), "n": (5, 130)}
HEADS = 4
LIMITS = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


class Graph:
    """A graph that grows from x [b, n, 32] by random steps; values are [b, n, channels]. Node order is legal."""

    def __init__(self, draw: Callable[[st.SearchStrategy], Any], steps: int) -> None:
        self.draw, self.form = draw, draw(st.sampled_from(sorted(FORMS)))
        self.rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        self.nodes: list[tuple[Any, Callable[..., Any]]] = []
        self.constants: dict[str, np.ndarray] = {}
        self.values: dict[str, int] = {"x": 32}
        self.matmul(wide=draw(st.booleans()))
        kinds = [self.matmul, self.unary, self.binary, self.gate, self.bias, self.cast, self.heads, self.split]
        for _ in range(steps):
            draw(st.sampled_from(kinds))()
        read = {name for node, _ in self.nodes for name in node.input}
        self.outputs = [name for name in self.values if name not in read and name != "x"]
        self.outputs += [v for v in self.values if v in read and v != "x" and draw(st.integers(0, 5)) == 0]

    def node(self, op: str, inputs: list[str], function: Callable[..., Any], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append((helper.make_node(op, inputs, [name], name, **attributes), function))
        return name

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def pick(self, channels: int | None = None) -> str:
        return self.draw(st.sampled_from([v for v, c in self.values.items() if channels in (None, c)][-5:]))

    def matmul(self, wide: bool = False, source: str | None = None) -> str:
        x = source or self.pick()
        depth, columns = self.values[x], 64 if wide else self.draw(st.sampled_from([32, 40, 64, 5]))
        w = (self.rng.standard_normal((depth, columns)) / depth**0.5).astype("float32")
        name = self.node("MatMul", [x, self.constant(w)], np.matmul)
        self.values[name] = columns
        return name

    def unary(self, x: str | None = None) -> str:
        x = x or self.pick()
        op = self.draw(st.sampled_from(sorted(UNARY)))
        name = self.node(op, [x], UNARY[op])
        self.values[name] = self.values[x]
        return name

    def binary(self, x: str | None = None, y: str | None = None) -> str:
        x = x or self.pick()
        y = y or self.pick(self.values[x])
        op = self.draw(st.sampled_from(sorted(BINARY)))
        name = self.node(op, [x, y], BINARY[op])
        self.values[name] = self.values[x]
        return name

    def gate(self) -> None:
        """Append two matmuls of one value, one of them activated, multiplied."""
        x = self.pick()
        gate = self.matmul(wide=True, source=x)
        up = self.matmul(wide=True, source=x)
        self.binary(self.unary(gate), up)

    def bias(self) -> None:
        x = self.pick()
        b = self.constant(self.rng.standard_normal(self.values[x]).astype("float32"))
        self.values[self.node("Add", [b, x], np.add)] = self.values[x]

    def cast(self) -> None:
        x = self.pick()
        half = self.node("Cast", [x], lambda v: v, to=10)
        self.values[self.node("Cast", [half], lambda v: v, to=1)] = self.values[x]

    def heads(self) -> None:
        """Split heads, move them to the front, change them, and move them back."""
        x = self.pick()
        width = self.values[x]
        if width % HEADS:
            return
        there, back = (self.constant(np.array(s, np.int64)) for s in ([0, 0, HEADS, -1], [0, 0, width]))
        y = self.node("Reshape", [x, there], lambda v, _: v.reshape(*v.shape[:2], HEADS, -1))
        if self.draw(st.booleans()):
            y = self.node("Transpose", [y], lambda v: v.transpose(0, 2, 1, 3), perm=[0, 2, 1, 3])
            y = self.node("Neg", [y], np.negative)
            y = self.node("Transpose", [y], lambda v: v.transpose(0, 2, 1, 3), perm=[0, 2, 1, 3])
        self.values[self.node("Reshape", [y, back], lambda v, _: v.reshape(*v.shape[:2], width))] = width

    def split(self) -> None:
        """Append gate and up in one matmul, as some models have it."""
        x = self.matmul(wide=True)
        lengths = self.constant(np.array([32, 32], np.int64))
        names = [f"v{len(self.nodes)}_{n}" for n in range(2)]
        self.nodes.append(
            (helper.make_node("Split", [x, lengths], names, axis=-1), lambda v, _: (v[..., :32], v[..., 32:]))
        )
        self.values |= dict.fromkeys(names, 32)
        self.binary(self.unary(names[0]), names[1])

    def model(self) -> Any:
        def info(name: str) -> Any:
            return helper.make_tensor_value_info(name, 1, [*FORMS[self.form], self.values[name]])

        left, available, order = [node for node, _ in self.nodes], {"x", *self.constants}, []
        while left:
            ready = [node for node in left if set(node.input) <= available]
            node = ready[int(self.rng.integers(len(ready)))]
            left.remove(node)
            order.append(node)
            available |= set(node.output)
        constants = [numpy_helper.from_array(a, name) for name, a in self.constants.items()]
        graph = helper.make_graph(order, "g", [info("x")], [*map(info, self.outputs)], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)

    def evaluate(self, x: np.ndarray) -> dict[str, np.ndarray]:
        values = {"x": x.astype(float), **self.constants}
        for node, function in self.nodes:
            result = function(*(values[name] for name in node.input))
            results = result if len(node.output) > 1 else (result,)
            values.update(zip(node.output, results, strict=True))
        return values


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    return Graph(draw, draw(st.integers(1, 7)))


def check(graph: Graph) -> lowering.Model:
    """Check that the matmul kernel serves every matmul, and results at every size."""
    model = lowering.compile(graph.model())
    kernels = [kernel for kernel in model.manifest.kernels if kernel.kind == "matmul"]
    assert kernels and {kernel.schedule for kernel in kernels} == {"matmul"}, kernels
    assert not [note for note in model.manifest.notes if "runs by the rule" in note]
    rounded = any(node.op_type == "Cast" for node, _ in graph.nodes)
    for which in range(2):
        dims = [d if isinstance(d, int) else SIZES[d][which] for d in FORMS[graph.form]]
        x = graph.rng.uniform(-1, 1, (*dims, 32)).astype("float32")
        expected, got = graph.evaluate(x), model.run({"x": x})
        for name in graph.outputs:
            assert got[name].shape == expected[name].shape
            error = np.abs(got[name] - expected[name]).max() / max(1, np.abs(expected[name]).max())
            assert error <= (2e-2 if rounded else 2e-5), (name, error)
    return model


@given(graphs())
@settings(LIMITS, max_examples=8)
def test_every_matmul_is_a_matmul(graph: Graph) -> None:
    check(graph)


@pytest.mark.slow
@given(graphs())
@settings(LIMITS, max_examples=int(os.environ.get("RANDOM_GRAPHS", "300")))
def test_many_graphs(graph: Graph) -> None:
    """Also in time: at most five times the expected time of its kernels."""
    model = check(graph)
    sizes = {d: 200 for d in FORMS[graph.form] if isinstance(d, str)}
    profile = lowering.bench(model, sizes, seconds=0.05)
    total = profile.total()
    assert sum(call.seconds for call in profile.calls) <= 5 * total.expected + 1e-4


@pytest.mark.parametrize("widths", [[8] * 14, [24, 8, 40] * 5], ids=["alike", "unlike"])
def test_many_matmuls_of_one_tensor_are_several_kernels(widths: list[int]) -> None:
    """One kernel has at most six: code grows with each."""
    rng = np.random.default_rng(len(widths))
    x = rng.standard_normal((3, 16)).astype(np.float32)
    weights = {f"w{k}": rng.standard_normal((16, n)).astype(np.float32) for k, n in enumerate(widths)}
    nodes = [helper.make_node("MatMul", ["x", name], [f"y{name}"]) for name in weights]
    outputs = [helper.make_tensor_value_info(f"y{name}", 1, ["n", w.shape[1]]) for name, w in weights.items()]
    constants = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["n", 16])], outputs, constants)
    module = lowering.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    results = module(x=x)
    for name, weight in weights.items():
        np.testing.assert_allclose(np.asarray(results[f"y{name}"]), x @ weight, atol=1e-5)
    calls = module.manifest.calls
    assert len(calls) == -(-len(widths) // 6), [call.kernel for call in calls]
