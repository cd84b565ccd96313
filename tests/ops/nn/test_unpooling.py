"""MaxPool with Indices, and MaxUnpool: for symbolic sizes, and for hostile indices."""

from __future__ import annotations

import itertools

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.errors import InputError
from tests.ops.expectations import import_node, make_model, value_info
from tests.support.error_codes import raises

DIMS = ["n", "c", "h", "w"]


@pytest.mark.parametrize("order, pads, dilations", [(0, 0, 1), (1, 1, 2)])
def test_indices_of_the_largest(order: int, pads: int, dilations: int) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "indices"], kernel_shape=[3, 2], strides=[2, 1], pads=[pads] * 4,
                            dilations=[dilations, 1], storage_order=order)  # fmt: skip
    outputs = [value_info("y", "float32", [f"y{k}" for k in range(4)])]
    outputs.append(value_info("indices", "int64", [f"p{k}" for k in range(4)]))
    proto = make_model([node], [value_info("x", "float32", DIMS)], outputs, 12)
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    rng = np.random.default_rng(0)
    for shape in ((1, 1, 5, 4), (2, 3, 8, 7)):
        x = rng.integers(-3, 3, shape).astype(np.float32)  # the first of equal elements
        results = module.run({"x": x})
        for name, expected in zip(("y", "indices"), session.run(None, {"x": x})):
            np.testing.assert_array_equal(results[name], expected)


def test_nan_is_the_largest() -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "indices"], kernel_shape=[3])
    outputs = [value_info("y", "float16", [1, 1, "m"]), value_info("indices", "int64", [1, 1, "m"])]
    module = lowering.compile(make_model([node], [value_info("x", "float16", [1, 1, "n"])], outputs, 12))
    results = module.run({"x": np.asarray([[[1, np.nan, 5, 2, 3]]], np.float16)})
    assert np.isnan(results["y"][0, 0, :2]).all() and results["indices"].tolist() == [[[1, 1, 2]]]


def make_unpooling(sized: bool, dtype: str = "float32") -> object:
    node = helper.make_node("MaxUnpool", ["x", "indices", *(["shape"] if sized else [])], ["y"], kernel_shape=[2, 2],
                            strides=[2, 2])  # fmt: skip
    inputs = [value_info("x", dtype, DIMS), value_info("indices", "int64", DIMS)]
    inputs += [value_info("shape", "int64", [4])] if sized else []
    return make_model([node], inputs, [value_info("y", dtype, [f"y{k}" for k in range(4)])], 11)


@pytest.mark.parametrize("sized, dtype", [(False, "float16"), (True, "float32")])
def test_unpooling(sized: bool, dtype: str) -> None:
    proto = make_unpooling(sized, dtype)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    rng = np.random.default_rng(1)
    for n, c, h, w in ((1, 1, 2, 2), (2, 3, 3, 1)):
        count = n * c * h * w
        indices = rng.permutation(4 * count)[:count].reshape(n, c, h, w)
        feeds = {"x": rng.standard_normal(indices.shape).astype(dtype), "indices": indices}
        if sized:
            feeds["shape"] = np.asarray([n, c, 2 * h + 1, 2 * w + 3])
        (expected,) = reference.run(None, feeds)
        np.testing.assert_array_equal(module.run(feeds)["y"], expected)


def test_indices_that_are_hostile() -> None:
    module = lowering.compile(make_unpooling(sized=True))
    x = np.ones((1, 1, 1, 2), np.float32)
    for index, shape in itertools.product((8, -1, 2**62, 3), ([1, 1, 2, 4], [1, 1, 1, 4], [2, 1, 2, 4])):
        feeds = {"x": x, "indices": np.asarray([[[[0, index]]]]), "shape": np.asarray(shape)}
        if index == 3 and shape == [1, 1, 2, 4]:
            assert module.run(feeds)["y"].ravel().tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
            continue
        with pytest.raises(InputError):
            module.run(feeds)


def test_refusals() -> None:
    inputs = [("float32", [1, 1, 2, 2]), ("int64", [1, 1, 2, 2])]
    with raises("max_unpool.input_unsupported"):
        import_node("MaxUnpool", inputs, opset=11, kernel_shape=[2])
    with raises("max_unpool.pads_too_large"):
        import_node("MaxUnpool", inputs, opset=11, kernel_shape=[2, 2], pads=[3, 0, 2, 0])
