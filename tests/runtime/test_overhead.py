"""A call of a tiny model costs little more than NumPy's own calls, whatever the size of donated memory."""

from __future__ import annotations

from collections.abc import Callable
from timeit import repeat

import numpy as np
import onnx
from onnx import TensorProto, helper

import lowering

Load = Callable[..., lowering.Model]


def best(call: Callable[[], object]) -> float:
    """Seconds of a call when nothing disturbs it."""
    return min(repeat(call, number=200, repeat=15)) / 200


def test_a_call_costs_what_a_few_additions_do(model: Load) -> None:
    """`run` takes as long as about 15 additions of tiny arrays, and a bound call as 7; the bars are four times that."""
    x = np.ones((2, 4), "f")
    arrays = {"x": x, "y": x}
    module = model("addition")
    addition = best(lambda: np.add(x, x))
    assert best(lambda: module.run(arrays)) < 60 * addition
    assert best(module.bind(arrays)) < 28 * addition


def test_donated_memory_costs_nothing() -> None:
    """A cache update takes as long with 100 MB of cache as with 1 kB: nothing is copied, and nothing else is read."""
    rows = tensor("update", "B", 1, 4)
    graph = helper.make_graph(
        [helper.make_node("TensorScatter", ["cache", "update", "at"], ["present"], axis=1)],
        "update",
        [tensor("cache", "B", "T", 4), rows, helper.make_tensor_value_info("at", TensorProto.INT64, ["B"])],
        [tensor("present", "B", "T", 4)],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    module = lowering.compile(proto, donate=("cache",))
    times = []
    for capacity in (64, 6_500_000):
        arrays = {"cache": np.zeros((1, capacity, 4), "f"), "update": np.ones((1, 1, 4), "f"), "at": np.array([7])}
        times.append(best(module.bind(arrays)))
    assert times[1] < 4 * times[0]


def tensor(name: str, *dims: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
