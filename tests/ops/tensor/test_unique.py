"""Unique compared with NumPy."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from tests.ops.expectations import Expectations, import_node
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


def compute_expected(x: np.ndarray, axis: int | None = None, sorted: int = 1) -> list[np.ndarray]:
    """Return NumPy's result; onnx's reference evaluator fails for slices in the order of appearance."""
    y, firsts, inverse, counts = np.unique(x, True, True, True, axis=axis)
    inverse = inverse.ravel()
    if not sorted:
        order = np.argsort(firsts)
        names = np.argsort(order)
        y = y[order] if axis is None else np.take(y, order, axis)
        firsts, counts, inverse = firsts[order], counts[order], names[inverse]
    return [y, *(np.asarray(array, np.int64) for array in (firsts, inverse, counts))]


def test_unique() -> None:
    """All elements and slices, sorted and in the order of appearance, of several types, with symbolic sizes."""
    case, special = Expectations(opset=21), np.array([np.nan, 2, -np.inf, 0.5, 2, np.nan, np.inf, -np.inf], np.float32)
    wide = RNG.integers(-40, 40, 500)
    for x, attributes in (
        (RNG.integers(-3, 3, (4, 5)), {}),
        (RNG.integers(0, 4, 17).astype(np.float32), {"sorted": 0}),
        (wide, {"sorted": 0}),
        (wide.astype(np.float16), {}),
        (special, {}),
        (RNG.integers(0, 2, (6, 2, 2)), {"axis": 0}),
        (RNG.integers(0, 2, (2, 9, 2)).astype(np.uint8), {"axis": 1, "sorted": 0}),
        (RNG.integers(0, 2, (3, 2, 8)).astype(np.float64), {"axis": -1}),
        (np.array([7.0], np.float32), {}),
        (RNG.integers(0, 2, 9).astype(bool), {}),
    ):
        dims = [[f"d{k}" for k in range(x.ndim)]]
        case.expect("Unique", [x], *compute_expected(x, **attributes), dims=dims, **attributes)
    case.check()


def test_unique_of_nothing() -> None:
    case, none = Expectations(opset=21), np.zeros(0, np.int64)
    for attributes in ({}, {"sorted": 0}):
        case.expect(
            "Unique", [np.zeros(0, np.float32)], np.zeros(0, np.float32), none, none, none, dims=[["n"]], **attributes
        )
    case.check()


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((2, 1, 16), {"axis": -2, "sorted": 0}),
        ((3, 1), {"axis": 1, "sorted": 0}),
        ((2, 3, 4), {"axis": 1, "sorted": 0}),
        ((2, 2, 5), {"axis": 2, "sorted": 0}),
        ((7,), {"axis": 0, "sorted": 0}),
        ((2, 3), {"sorted": 0}),
        ((3, 1, 2), {"axis": 1}),
    ],
)
def test_unique_of_constants(shape: tuple[int, ...], attributes: dict[str, int]) -> None:
    """The folding must not use onnx's reference evaluator: it takes slices along the first axis instead."""
    x = np.random.default_rng(1).integers(-1, 2, shape)
    node = helper.make_node("Unique", ["x"], ["y", "firsts", "inverse", "counts"], **attributes)
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None) for name in node.output]
    graph = helper.make_graph([node], "unique", [], results, [numpy_helper.from_array(x, "x")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    for actual, expected_array in zip(
        lowering.compile(model).run({}).values(), compute_expected(x, **attributes), strict=True
    ):
        np.testing.assert_array_equal(actual, expected_array)


def test_refusals() -> None:
    with raises("node.axis_out_of_range"):
        import_node("Unique", [("float32", (2, 3))], opset=21, axis=2)
    with raises("node.dtype_unsupported"):
        import_node("Unique", [("object", (2,))], opset=21)
