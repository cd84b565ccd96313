"""Scratch memory of a kernel persists between iterations of a loop, also where constants are folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering

RNG = np.random.default_rng(0)
BOXES = np.sort(RNG.uniform(0, 10, (1, 9, 2, 2)), 2).reshape(1, 9, 4).astype(np.float32)
SCORES = RNG.uniform(0, 1, (1, 2, 9)).astype(np.float32)


def run_unique(x: np.ndarray) -> list[np.ndarray]:
    y, firsts, names, counts = np.unique(x, True, True, True)
    order = np.argsort(firsts)
    return [y[order], firsts[order], np.argsort(order)[names], counts[order]]


def run_boxes(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(a) for a in ReferenceEvaluator(make_model("NonMaxSuppression", arrays, 1, True)).run(None, {})]


CASES: dict[str, tuple[str, list[np.ndarray], Callable[..., list[np.ndarray]], dict[str, Any]]] = {
    "Unique": ("Unique", [RNG.integers(-2, 3, 23)], run_unique, {"sorted": 0}),
    "Unique of floats": ("Unique", [RNG.integers(0, 4, 40).astype(np.float32)], run_unique, {"sorted": 0}),
    "Det": ("Det", [RNG.standard_normal((3, 5, 5))], lambda x: [np.linalg.det(x)], {}),
    "Det of one": ("Det", [RNG.standard_normal((4, 4))], lambda x: [np.linalg.det(x)], {}),
    "Inverse": ("com.microsoft.Inverse", [RNG.standard_normal((2, 4, 4))], lambda x: [np.linalg.inv(x)], {}),
    "NonMaxSuppression": (
        "NonMaxSuppression",
        [BOXES, SCORES, np.array([4]), np.array([0.3], np.float32), np.array([0.1], np.float32)],
        run_boxes,
        {},
    ),
    "TopK": ("TopK", [RNG.standard_normal((3, 50)), np.array([7])], lambda x, k: [-np.sort(-x)[:, :7]], {}),
}
OUTPUTS = {"Unique": 4, "TopK": 2}


def make_model(op: str, arrays: Any, outputs: int, is_constant: bool, **attributes: Any) -> onnx.ModelProto:
    domain, _, name = op.rpartition(".")
    names = [f"x{k}" for k in range(len(arrays))]
    node = helper.make_node(name, names, [f"y{k}" for k in range(outputs)], domain=domain, **attributes)
    tensors = [numpy_helper.from_array(a, n) for a, n in zip(arrays, names)]
    infos = [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in tensors]
    inputs, constants = ([], tensors) if is_constant else (infos[:1], tensors[1:])
    results = [helper.make_empty_tensor_value_info(name) for name in node.output]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph([node], "scratch", inputs, results, constants), opset_imports=opsets, ir_version=10
    )


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_scratch_lasts(name: str, is_constant: bool) -> None:
    op, arrays, expected, attributes = CASES[name]
    model = lowering.compile(make_model(op, arrays, OUTPUTS.get(op, 1), is_constant, **attributes))
    results = model.run({} if is_constant else {"x0": arrays[0]})
    for actual, expected_array in zip(results.values(), expected(*arrays)):
        np.testing.assert_allclose(actual, expected_array, rtol=1e-9 if expected_array.dtype == np.float64 else 0)
