"""Equal functions are scheduled and compiled once, in whatever order they take their symbols."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

import lowering
import schedules
from lowering.compiling import objects


def blocks(count: int) -> onnx.ModelProto:
    """A convolution that halves two symbolic sizes, which no later tensor has as they are, and equal blocks."""
    rng = np.random.default_rng(0)
    nodes = [helper.make_node("Conv", ["x", "w"], ["x0"], pads=[1] * 4, strides=[2, 2])]
    weights = [numpy_helper.from_array(rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / 9, "w")]
    for n in range(count):
        weight = rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / 9
        weights.append(numpy_helper.from_array(weight, f"w{n}"))
        nodes += [
            helper.make_node("Conv", [f"x{n}", f"w{n}"], [f"c{n}"], pads=[1] * 4),
            helper.make_node("Relu", [f"c{n}"], [f"r{n}"]),
            helper.make_node("Softmax", [f"r{n}"], [f"s{n}"], axis=1),
            helper.make_node("Add", [f"s{n}", f"x{n}"], [f"x{n + 1}"]),
        ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, "h", "w"])
    y = helper.make_tensor_value_info(f"x{count}", TensorProto.FLOAT, ["n", 8, "p", "q"])
    graph = helper.make_graph(nodes, "blocks", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.fixture
def work(tmp_path, monkeypatch) -> dict[str, list[str]]:
    """The kernels that are scheduled, and those that LLVM compiles, with a cache of this test alone."""
    monkeypatch.setenv("ONNX_LOWERING_CACHE", str(tmp_path / "cache"))
    symbols: dict[str, list[str]] = {"scheduled": [], "compiled": []}
    compiles, schedule = objects.KernelCompiler.compiled, schedules._scheduled

    def compiled(self, func, target):
        symbols["compiled"].append(str(func.attrs["global_symbol"]))
        return compiles(self, func, target)

    def scheduled(func, *rest):
        symbols["scheduled"].append(str(func.attrs["global_symbol"]) if "global_symbol" in func.attrs else "")
        return schedule(func, *rest)

    monkeypatch.setattr(objects.KernelCompiler, "compiled", compiled)
    monkeypatch.setattr(schedules, "_scheduled", scheduled)
    return symbols


def test_more_equal_blocks_are_no_more_kernels(work, tmp_path) -> None:
    lowering.compile(blocks(2))
    few = {stage: len(names) for stage, names in work.items()}
    assert len(set(work["compiled"])) == len(work["compiled"])  # none twice, even by two threads
    model = lowering.compile(blocks(6))
    assert len(work["scheduled"]) == 2 * few["scheduled"]
    names = [kernel.name for kernel in model.manifest.kernels]
    assert len(model.manifest.calls) > 2 * len(names)
    assert names == [kernel.name for kernel in lowering.compile(blocks(6)).manifest.kernels]
    x = np.random.default_rng(1).standard_normal((2, 8, 9, 14)).astype(np.float32)
    (actual,) = model.run({"x": x}).values()
    (expected,) = onnx.reference.ReferenceEvaluator(blocks(6)).run(None, {"x": x})
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
