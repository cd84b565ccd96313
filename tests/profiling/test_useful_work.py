"""`bench` counts the work of the computation of a model, not of the stored form of its weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import lowering

WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int4": {"weights": "int4"},
    "int8": {"weights": "int8"},
    "int4, other sizes": {"weights": "int4", "rows": 1, "k": 256, "n": 96},
    "int8, one row": {"weights": "int8", "rows": 1},
    "bfloat16": {"precision": "bfloat16", "k": 64, "n": 160},
    "zero points": {"zeros": True},
    "zero points, three rows": {"zeros": True, "rows": 3, "k": 96},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", WEIGHTS)
def test_dequantization_is_not_work(case: str) -> None:
    """A matmul has two operations for each pair of elements, however its weights are stored."""
    options = dict(WEIGHTS[case])
    rows, k, n = (options.pop(name, size) for name, size in (("rows", 37), ("k", 128), ("n", 64)))
    rng = np.random.default_rng(0)
    if options.pop("zeros", False):
        text = "f = DequantizeLinear <axis = 0, block_size = 32> (w, scale, zero) y = MatMul (x, f)"
        arrays = {
            "w": rng.integers(0, 255, (k, n), np.uint8),
            "scale": rng.random((k // 32, n), np.float32),
            "zero": rng.integers(0, 255, (k // 32, n), np.uint8),
        }
    else:
        text, arrays = "y = MatMul (x, w)", {"w": rng.standard_normal((k, n)).astype(np.float32)}
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 24]> m (float[n, {k}] x) => (float[n, {n}] y) {{ {text} }}'
    )
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    profile = lowering.bench(lowering.compile(model, **options), {"n": rows}, seconds=0, warm_up=0)
    assert profile.total().flops == 2 * rows * k * n


def test_a_norm_before_a_matmul_counts_once_for_each_element() -> None:
    rows, k, n = 33, 64, 256
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 24]> m (float[n, {k}] x) => (float[n, {n}] y) {{
          z = RMSNormalization (x, gamma) y = MatMul (z, w)
        }}"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("gamma", (k,)), ("w", (k, n))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    work = lowering.bench(lowering.compile(model), {"n": rows}, seconds=0, warm_up=0).total().flops
    assert 2 * rows * k <= work - 2 * rows * k * n <= 6 * rows * k


@pytest.mark.parametrize("rows, k, n", [(1, 64, 32), (37, 128, 64), (5, 30, 17)])
def test_integers_count_as_floats_do(rows: int, k: int, n: int) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> m (uint8[n, {k}] x) => (int32[n, {n}] y) {{
          y = MatMulInteger (x, w)
        }}"""
    )
    w = np.random.default_rng(0).integers(-128, 128, (k, n)).astype(np.int8)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    assert lowering.bench(lowering.compile(model), {"n": rows}, seconds=0, warm_up=0).total().flops == 2 * rows * k * n


@pytest.mark.parametrize("is_quantized", [False, True])
def test_recurrences_count_the_matmuls_with_their_states(is_quantized: bool) -> None:
    """Beside those with their inputs, and little for gates and quantization."""
    units, width, steps, batches, gates = 32, 16, 9, 2, 4
    rng = np.random.default_rng(0)
    if is_quantized:
        arrays = {
            "w": rng.integers(-127, 128, (1, width, gates * units)).astype(np.int8),
            "r": rng.integers(-127, 128, (1, units, gates * units)).astype(np.int8),
            "b": np.zeros((1, 2 * gates * units), np.float32),
            **{f"{name}_scale": np.full(1, 0.01, np.float32) for name in "wr"},
            **{f"{name}_zero": np.zeros(1, np.int8) for name in "wr"},
        }
        inputs = ["x", "w", "r", "b", "", "", "", "", "w_scale", "w_zero", "r_scale", "r_zero"]
        node = onnx.helper.make_node("DynamicQuantizeLSTM", inputs, ["y"], hidden_size=units, domain="com.microsoft")
    else:
        shapes = {"w": (1, gates * units, width), "r": (1, gates * units, units)}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        node = onnx.helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=units)
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node], "m", [onnx.helper.make_tensor_value_info("x", kind, ["L", "B", width])],
        [onnx.helper.make_tensor_value_info("y", kind, ["L", 1, "B", units])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    profile = lowering.bench(lowering.compile(model), {"L": steps, "B": batches}, seconds=0, warm_up=0)
    matmuls = 2 * gates * units * (units + width) * steps * batches
    assert matmuls <= profile.total().flops <= 1.2 * matmuls
