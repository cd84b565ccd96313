"""What `bench` counts as work: what a model computes, not what its weights are stored in."""

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
