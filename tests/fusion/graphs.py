"""Models in ONNX's text form, fused, and compared with their unfused form."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx.reference import ReferenceEvaluator

from lowering.fusion import fuse
from lowering.graph.loading.model import load_model

SIZES = {"B": 2, "S": 3, "T": 5, "P": 2, "N": 4}


def parse_graph(graph: str, opset: int = 18, weights: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """Return a model from its inputs, outputs and nodes in text; weights are initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> m {graph}')
    for name, array in (weights or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def draw_feeds(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw random inputs: floats standard normal, bools mostly true, integers 0 or 1."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        shape = [d.dim_value or SIZES[d.dim_param] for d in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if dtype == np.bool_:
            array: Any = rng.random(shape) < 0.7
        elif np.issubdtype(dtype, np.integer):
            array = rng.integers(0, 2, shape)
        else:
            array = rng.standard_normal(shape)
        arrays[value.name] = np.asarray(array).astype(dtype)
    return arrays


def count_operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def fuse_model(model: onnx.ModelProto) -> ir.Model:
    """Return the fused model, which onnx's checker accepts."""
    result = fuse(load_model(model))
    onnx.checker.check_model(ir.to_proto(result), full_check=True)
    return result


def run_model(model: onnx.ModelProto, inputs: dict[str, np.ndarray], reference: bool = False) -> list[Any]:
    """Run a model by onnx's evaluator, or by ONNX Runtime as written, without rewrites of its own."""
    if reference:
        return ReferenceEvaluator(model).run(None, inputs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, inputs)


def check_fused(model: onnx.ModelProto, expected: dict[str, int], rtol: float = 1e-5, atol: float = 2e-6) -> ir.Model:
    """Fuse the model, count operators, and compare it, run by onnx's evaluator, with the unfused model."""
    result = fuse_model(model)
    counts = count_operators(result)
    assert {name: counts[name] for name in expected} == expected, counts
    inputs = draw_feeds(model)
    expected_results = run_model(model, inputs)
    actual = run_model(ir.to_proto(result), inputs, reference=True)
    for a, w in zip(actual, expected_results):
        assert a.dtype == w.dtype and a.shape == w.shape
        np.testing.assert_allclose(a.astype(np.float64), w.astype(np.float64), rtol=rtol, atol=atol)
    return result


def check_untouched(model: onnx.ModelProto) -> None:
    """Check that no pass matches: the returned model is the one that was passed."""
    loaded = load_model(model)
    before = ir.to_proto(loaded).SerializeToString()
    assert fuse(loaded) is loaded
    assert ir.to_proto(loaded).SerializeToString() == before
