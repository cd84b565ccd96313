"""TopK, ArgMax, ArgMin, NonZero, Compress and CumSum, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper, numpy_helper

from lowering.graph.loading.model import load_model
from lowering.importing.importer import import_model
from lowering.ops import lookup
from tests.ops.expectations import Expectations, import_node, make_model, value_info
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def select_top(x: np.ndarray, k: int, axis: int, largest: bool) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-x if largest else x, axis=axis, kind="stable")
    indices = np.take(order, np.arange(k), axis)
    return np.take_along_axis(x, indices, axis), indices


def test_a_few_of_a_long_row_are_selected_without_sorting_it() -> None:
    """The only memory is the selection; ascending, descending and equal elements, where each or none moves others."""
    e, n = Expectations(), 5000
    for x in (np.arange(n), -np.arange(n), np.zeros(n), np.arange(n) % 7):
        e.expect("TopK", [x.astype(np.float32), ints(32)], *select_top(x.astype(np.float32), 32, 0, True), constant=[1])
    e.check()
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"])
    outputs = [value_info("v", "float32", [32]), value_info("i", "int64", [32])]
    proto = make_model([node], [value_info("x", "float32", [n])], outputs, 25, [numpy_helper.from_array(ints(32), "k")])
    text = import_model(load_model(proto), lookup).module.script()
    allocated = [line for line in text.splitlines() if "alloc_buffer" in line]
    assert allocated and not any(str(n) in line for line in allocated)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int32"])
def test_top_k_keeps_the_order_of_equal_elements(dtype: str) -> None:
    e = Expectations()
    x = RNG.integers(-4, 5, (3, 17, 2)).astype(dtype)
    for axis, k, largest in ((1, 5, True), (1, 17, False), (-1, 2, True), (0, 1, False), (1, 0, True)):
        expected = select_top(x, k, axis, largest)
        e.expect("TopK", [x, ints(k)], *expected, dims=[["a", "b", 2], None], axis=axis, largest=int(largest))
        e.expect("TopK", [x, ints(k)], *expected, constant=[1], axis=axis, largest=int(largest))
    e.check()


def test_top_k_takes_nan_for_the_largest() -> None:
    x = np.array([1, np.nan, 3, -np.inf, np.inf], np.float32)
    e = Expectations()
    e.expect("TopK", [x, ints(5)], x[[1, 4, 2, 0, 3]], ints(1, 4, 2, 0, 3))
    e.expect("TopK", [x, ints(5)], x[[3, 0, 2, 4, 1]], ints(3, 0, 2, 4, 1), largest=0)
    e.check()


def test_top_k_of_the_first_version() -> None:
    x = RNG.standard_normal((2, 6)).astype(np.float32)
    e = Expectations(opset=9)
    e.expect("TopK", [x], *select_top(x, 2, 1, True), k=2)
    e.check()


def test_top_k_of_more_than_there_are() -> None:
    x = np.zeros(3, np.float32)
    e = Expectations()
    e.expect("TopK", [x, ints(4)], x, ints(0, 1, 2), dims=[["n"], None])
    with raises("top_k.k_out_of_range"):
        e.check()
    with raises("top_k.k_out_of_range"):
        import_node("TopK", [("float32", [3])], results=2, opset=9, k=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
def test_arg_max_and_arg_min(dtype: str) -> None:
    e = Expectations()
    x = RNG.integers(0, 4, (3, 5, 2)).astype(dtype)
    for name, function in (("ArgMax", np.argmax), ("ArgMin", np.argmin)):
        for axis in (0, 1, -1):
            first, last = function(x, axis), x.shape[axis] - 1 - function(np.flip(x, axis), axis)
            e.expect(name, [x], first, dims=[["a", "b", "c"]], axis=axis, keepdims=0)
            e.expect(name, [x], np.expand_dims(last, axis), axis=axis, select_last_index=1)
    e.check()


def test_arg_of_nan() -> None:
    x = np.array([[1, np.nan, 3, np.nan]], np.float32)
    e = Expectations()
    for name in ("ArgMax", "ArgMin"):
        e.expect(name, [x], ints(1), axis=1, keepdims=0)
        e.expect(name, [x], ints(3), axis=1, keepdims=0, select_last_index=1)
    e.check()


def test_non_zero() -> None:
    e = Expectations()
    for x in (np.array([[0, 2.5, -0.0], [np.nan, 0, 1]]), np.zeros((2, 2), np.int32), np.array([True, False, True])):
        e.expect("NonZero", [x], np.array(np.nonzero(x)), dims=[["a", "b"][: x.ndim]])
    e.expect("NonZero", [np.array(3.0)], np.zeros((0, 1), np.int64))
    e.check()


def test_compress() -> None:
    e = Expectations()
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    e.expect("Compress", [x, np.array([False, True, True])], x[1:], dims=[["n", 4], None], axis=0)
    e.expect("Compress", [x, np.array([True, False, True])], x[:, [0, 2]], axis=1)
    e.expect("Compress", [x, np.array([True, False, False, False, True])], x.ravel()[[0, 4]])
    e.check()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_cum_sum(dtype: str) -> None:
    e = Expectations()
    x = RNG.integers(-9, 9, (3, 4, 2)).astype(dtype)
    for axis in (0, 1, -1):
        for exclusive in (0, 1):
            for reverse in (0, 1):
                expected = np.flip(x, axis) if reverse else x
                expected = np.cumsum(expected, axis, dtype) - (expected if exclusive else 0)
                expected = (np.flip(expected, axis) if reverse else expected).astype(dtype)
                options = {"exclusive": exclusive, "reverse": reverse}
                e.expect("CumSum", [x, np.array(axis)], expected, dims=[["a", "b", "c"], None], **options)
                e.expect("CumSum", [x, np.array(axis, np.int32)], expected, constant=[1], **options)
    e.check()


def test_types_without_order_or_sum_are_refused() -> None:
    with raises("node.dtype_unsupported"):
        import_node("ArgMax", [("complex64", [3])])
    with raises("node.dtype_not_arithmetic"):
        import_node("CumSum", [("int4", [3]), ("int64", [])])
