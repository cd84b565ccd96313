"""Random graphs of element-wise functions, reductions, movements and matmuls, each with the same in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" a NumPy type name)
import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import helper

Function = Callable[..., Any]
Full = tuple[bool, bool, bool]
"""Which of the dimensions (b, n, channels) a value has; it has one element along the others."""

_erf = np.vectorize(math.erf, otypes=[float])

UNARY: dict[str, Function] = {
    "Abs": np.abs,
    "Erf": _erf,
    "Gelu": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "Identity": lambda x: x,
    "Neg": np.negative,
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sin": np.sin,
    "Softplus": lambda x: np.logaddexp(0, x),
    "Tanh": np.tanh,
}
BINARY: dict[str, Function] = {
    "Add": np.add,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Sub": np.subtract,
}
REDUCE: dict[str, Function] = {
    "ReduceL2": lambda x, **along: np.sqrt((x * x).sum(**along)),
    "ReduceMax": np.max,
    "ReduceMean": np.mean,
    "ReduceMin": np.min,
}
_EPSILON = 0.125  # of LayerNormalization: exact in every type


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def _layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + _EPSILON) * scale + bias


class Graph:
    """A graph that grows from x (b, n, channels), y (b, 1, channels), z (1, n, channels); b and n are symbolic."""

    def __init__(self, draw: Callable[[st.SearchStrategy], Any], dtype: str, steps: int) -> None:
        self.draw, self.dtype = draw, dtype
        self.channels = draw(st.sampled_from([1, 2, 6, 16, 34, 100]))
        self.rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        self.names = (f"v{k}" for k in itertools.count())
        self.nodes: list[onnx.NodeProto] = []
        self.functions: list[Function] = []
        self.constants: dict[str, np.ndarray] = {}
        self.values: dict[str, Full] = {
            "x": (True, True, True),
            "y": (True, False, True),
            "z": (False, True, True),
        }
        self.inputs = tuple(self.values)
        kinds = [self.unary, self.binary, self.reduce, self.softmax, self.norm, self.swap, self.rotate, self.where]
        kinds += [self.unary, self.binary, self.weight, self.scores]
        for _ in range(steps):
            draw(st.sampled_from(kinds))()

    def pick(self, channels: bool = False) -> tuple[str, Full]:
        """Return one of the latest values."""
        return self.draw(st.sampled_from([v for v in self.values.items() if v[1][2] or not channels][-4:]))

    def node(self, op: str, inputs: list[str], function: Function, **attributes: Any) -> str:
        name = next(self.names)
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        self.functions.append(function)
        return name

    def constant(self, array: np.ndarray) -> str:
        name = next(self.names)
        self.constants[name] = array
        return name

    def unary(self) -> None:
        x, full = self.pick()
        op = self.draw(st.sampled_from(sorted(UNARY)))
        self.values[self.node(op, [x], UNARY[op])] = full

    def binary(self) -> None:
        (x, a), (y, b) = self.pick(), self.pick()
        op = self.draw(st.sampled_from(sorted(BINARY)))
        self.values[self.node(op, [x, y], BINARY[op])] = tuple(p or q for p, q in zip(a, b))

    def reduce(self) -> None:
        x, full = self.pick()
        op = self.draw(st.sampled_from(sorted(REDUCE)))
        axes = tuple(sorted(self.draw(st.sets(st.integers(0, 2), min_size=1))))
        along = self.constant(np.array(axes, np.int64))
        name = self.node(op, [x, along], lambda v, _: REDUCE[op](v, axis=axes, keepdims=True), keepdims=1)
        self.values[name] = tuple(p and k not in axes for k, p in enumerate(full))

    def softmax(self) -> None:
        x, full = self.pick()
        axis = self.draw(st.integers(0, 2))
        self.values[self.node("Softmax", [x], lambda v: _softmax(v, axis), axis=axis)] = full

    def norm(self) -> None:
        x, full = self.pick(channels=True)
        scale, bias = (
            self.constant(self.rng.uniform(low, 1.5, self.channels).astype(self.dtype)) for low in (0.5, -1.5)
        )
        name = self.node("LayerNormalization", [x, scale, bias], _layer_norm, axis=-1, epsilon=_EPSILON)
        self.values[name] = full

    def swap(self) -> None:
        """Transpose, change, and transpose back."""
        x, full = self.pick()
        there = self.draw(st.permutations([0, 1, 2]))
        back = [there.index(k) for k in range(3)]
        op = self.draw(st.sampled_from(sorted(UNARY)))
        x = self.node("Transpose", [x], lambda v: v.transpose(there), perm=there)
        x = self.node(op, [x], UNARY[op])
        self.values[self.node("Transpose", [x], lambda v: v.transpose(back), perm=back)] = full

    def rotate(self) -> None:
        """Slice the channels in two, exchange the slices, and negate one."""
        x, full = self.pick(channels=True)
        split = self.draw(st.integers(0, self.channels))
        zero, middle, end, axis = (self.constant(np.array([k], np.int64)) for k in (0, split, self.channels, 2))
        a = self.node("Slice", [x, zero, middle, axis], lambda v, *_: v[..., :split])
        b = self.node("Slice", [x, middle, end, axis], lambda v, *_: v[..., split:])
        b = self.node("Neg", [b], np.negative)
        self.values[self.node("Concat", [b, a], lambda p, q: np.concatenate([p, q], -1), axis=-1)] = full

    def where(self) -> None:
        """Choose by the inputs, which rounding does not change."""
        (x, _), (y, _) = self.pick(), self.pick()
        condition = self.node("Greater", ["x", "y"], np.greater)
        self.values[self.node("Where", [condition, x, y], np.where)] = (True, True, True)

    def weight(self) -> None:
        x, full = self.pick(channels=True)
        w = self.rng.standard_normal((self.channels, self.channels)) / math.sqrt(self.channels)
        self.values[self.node("MatMul", [x, self.constant(w.astype(self.dtype))], np.matmul)] = full

    def scores(self) -> None:
        """Append attention in single operators."""
        (x, a), (y, b) = self.pick(channels=True), self.pick(channels=True)
        scale = self.constant(np.array(self.channels**-0.5, self.dtype))
        s = self.node("Transpose", [y], lambda v: v.transpose(0, 2, 1), perm=[0, 2, 1])
        s = self.node("MatMul", [x, s], np.matmul)
        s = self.node("Mul", [s, scale], np.multiply)
        s = self.node("Softmax", [s], lambda v: _softmax(v, -1), axis=-1)
        self.values[self.node("MatMul", [s, y], np.matmul)] = (a[0] or b[0], a[1], True)

    @property
    def outputs(self) -> list[str]:
        return [name for name in list(self.values)[-2:] if name not in self.inputs]

    def model(self) -> onnx.ModelProto:
        def info(name: str) -> onnx.ValueInfoProto:
            dims = [d if full else 1 for d, full in zip(("b", "n", self.channels), self.values[name])]
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)), dims)

        constants = [onnx.numpy_helper.from_array(a, name) for name, a in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", [*map(info, self.inputs)], [*map(info, self.outputs)], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)

    def feeds(self, b: int, n: int) -> dict[str, np.ndarray]:
        sizes = (b, n, self.channels)
        shapes = {name: [s if full else 1 for s, full in zip(sizes, self.values[name])] for name in self.inputs}
        return {name: self.rng.uniform(-2, 2, shape).astype(self.dtype) for name, shape in shapes.items()}

    def evaluate(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return every value in float64."""
        values = {name: array.astype(float) for name, array in {**feeds, **self.constants}.items()}
        for node, function in zip(self.nodes, self.functions):
            values[node.output[0]] = np.asarray(function(*(values[name] for name in node.input)))
        return values
