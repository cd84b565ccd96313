"""Heads are read and written where matmuls leave them: nothing is transposed for attention and caches."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.demo.decoder import DecoderConfig, build_decoder

CONFIG = DecoderConfig(2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocabulary=50, positions=64)


def kernels(model: onnx.ModelProto, target: str = "cpu", **options: object) -> list[str]:
    return [kernel.name for kernel in lowering.compile(model, target, **options).manifest.kernels]


@pytest.mark.parametrize("donate", [(), ("cache_.*",)])
def test_a_decoder_transposes_nothing(donate: tuple[str, ...]) -> None:
    """The results equal those of onnx's evaluator, for several tokens of sequences at different positions."""
    model = build_decoder(CONFIG)
    assert not [name for name in kernels(model, donate=donate) if "transpose" in name]
    rng = np.random.default_rng(0)
    caches = {
        f"cache_{kind}.{n}": rng.standard_normal((2, 2, 32, 16)).astype("float32") for n in (0, 1) for kind in "kv"
    }
    feeds = {"ids": rng.integers(0, 50, (2, 5)), "write_indices": np.array([3, 11]), **caches}
    want = dict(zip([output.name for output in model.graph.output], ReferenceEvaluator(model).run(None, feeds)))
    results = lowering.compile(model, donate=donate).run({name: array.copy() for name, array in feeds.items()})
    for name, expected in want.items():
        np.testing.assert_allclose(results[name], expected, rtol=2e-4, atol=2e-4)


def test_what_others_read_is_transposed_still() -> None:
    """A result of heads before rows is itself an output, and the queries are too."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["q"], perm=[0, 2, 1, 3]),
        helper.make_node("Attention", ["q", "k", "v"], ["y"]),
        helper.make_node("Transpose", ["y"], ["rows"], perm=[0, 2, 1, 3]),
    ]
    sizes = {"x": ("b", "s", 4, 8), "k": ("b", 2, "t", 8), "v": ("b", 2, "t", 8)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    shapes = {"q": ("b", 4, "s", 8), "y": ("b", 4, "s", 8), "rows": ("b", "s", 4, 8)}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "heads", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    rng = np.random.default_rng(1)
    feeds = {
        name: rng.standard_normal(shape).astype("float32")
        for name, shape in (("x", (2, 3, 4, 8)), ("k", (2, 2, 5, 8)), ("v", (2, 2, 5, 8)))
    }
    want = ReferenceEvaluator(model).run(None, feeds)
    results = lowering.compile(model).run(feeds)
    for name, expected in zip(("q", "y", "rows"), want):
        np.testing.assert_allclose(results[name], expected, rtol=1e-5, atol=1e-5)
