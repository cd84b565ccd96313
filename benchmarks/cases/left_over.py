"""Operators that none of our kernels is made for: what runs by plain rules, and what tuning makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from .case import Arrays, Case, Work


@dataclass(frozen=True, kw_only=True)
class NodeCase(Case):
    """One node. shapes are those of its inputs that are data, by name, with the element type; constants are the rest,
    by name and in the order of the node's inputs, "" for one that is left out.
    """

    operator: str
    inputs: tuple[str, ...]
    shapes: Mapping[str, tuple[str, tuple[int, ...]]]
    constants: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]

    def feeds(self) -> Arrays:
        rng = np.random.default_rng(0)
        return {name: _random(rng, dtype, shape) for name, (dtype, shape) in self.shapes.items()}

    def model(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in self.shapes.items()
        ]
        result = _expected(self)["y"]
        graph = helper.make_graph(
            [helper.make_node(self.operator, self.inputs, ["y"], **self.attributes)],
            "node",
            inputs,
            [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(result.dtype), result.shape)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)

    def expected(self) -> Arrays:
        return _expected(self)

    def work(self) -> Work:
        """Inputs and output, each once."""
        arrays = [*self.feeds().values(), *self.constants.values(), *self.expected().values()]
        return Work(float(sum(array.nbytes for array in arrays)), "byte")

    def __hash__(self) -> int:
        return hash(self.name)


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 100, shape).astype(dtype)


@cache
def _expected(case: NodeCase) -> Arrays:
    """By onnx's own evaluator, in the types of the model."""
    node = helper.make_node(case.operator, case.inputs, ["y"], **case.attributes)
    feeds = {**case.feeds(), **case.constants}
    graph = helper.make_graph(
        [node],
        "node",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()],
        [helper.make_value_info("y", onnx.TypeProto())],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return {"y": np.asarray(ReferenceEvaluator(model).run(None, feeds)[0])}


def cases() -> list[NodeCase]:
    rng = np.random.default_rng(1)
    twice = {"scales": np.array([1, 1, 2, 2], np.float32)}
    image = {"x": ("float32", (1, 64, 56, 56))}
    narrow = {"w": rng.integers(-100, 100, (128, 256)).astype(np.int8)}

    def case(name: str, operator: str, inputs: str, shapes: Any, constants: Any, **attributes: Any) -> NodeCase:
        names = tuple("" if n == "-" else n for n in inputs.split())
        return NodeCase(
            name=name, group="left over", operator=operator, inputs=names, shapes=shapes, constants=constants,
            attributes=attributes,
        )  # fmt: skip

    return [
        case("resize, nearest, 56 to 112", "Resize", "x - scales", image, twice, mode="nearest"),
        case("resize, linear, 56 to 112", "Resize", "x - scales", image, twice, mode="linear"),
        case("resize, cubic, 56 to 112", "Resize", "x - scales", image, twice, mode="cubic"),
        case("pooling by L2, 3 x 3", "LpPool", "x", image, {}, kernel_shape=[3, 3]),
        case("L2 over the first and last axis", "ReduceL2", "x axes", {"x": ("float32", (64, 100, 30))},
             {"axes": np.array([0, 2])}),
        case("matmul of integers", "MatMulInteger", "x w", {"x": ("uint8", (128, 128))}, narrow),
    ]  # fmt: skip
