"""Col2Im compared with onnx's evaluator: sizes that the model computes, sizes of inputs, and sizes that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from tests.ops.expectations import import_node, make_model, value_info
from tests.support.error_codes import raises


def make_col2im(dtype: str, has_block_input: bool, **attributes: Any) -> onnx.ModelProto:
    """Return a model with blocks of 2 x 3; image_shape is an input, and on request block_shape, too."""
    node = helper.make_node("Col2Im", ["x", "image", "block"], ["y"], **attributes)
    inputs = [value_info("x", dtype, ["n", "r", "l"]), value_info("image", "int64", [2])]
    block, constants = numpy_helper.from_array(np.asarray([2, 3]), "block"), []
    if has_block_input:
        inputs.append(value_info("block", "int64", [2]))
    else:
        constants.append(block)
    return make_model([node], inputs, [value_info("y", dtype, ["a", "b", "c", "d"])], 18, constants)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("has_block_input", [False, True])
def test_blocks_that_overlap(dtype: str, has_block_input: bool) -> None:
    attributes = {"strides": [1, 2], "pads": [1, 0, 0, 2], "dilations": [2, 1]}
    proto = make_col2im(dtype, has_block_input, **attributes)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    for n, c, (h, w) in ((2, 3, (5, 7)), (1, 1, (2, 1)), (0, 2, (4, 4))):
        counts = (h + 1 - 2 - 1) // 1 + 1, (w + 2 - 2 - 1) // 2 + 1
        x = np.random.default_rng(0).integers(-8, 8, (n, c * 6, counts[0] * counts[1])).astype(dtype)
        feeds = {"x": x, "image": np.asarray([h, w]), **({"block": np.asarray([2, 3])} if has_block_input else {})}
        actual = module.run(feeds)["y"]
        expected = reference.run(None, feeds)[0] if n else np.zeros((0, c, h, w), dtype)
        assert actual.dtype == x.dtype
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "feeds, message",
    [
        ({"x": (1, 7, 6), "image": [3, 5]}, "not a multiple"),
        ({"x": (1, 6, 5), "image": [3, 5]}, "dimension 'l'|Col2Im"),
        ({"x": (1, 6, 6), "image": [1, 5]}, "a block covers 2 elements along axis 2"),
        ({"x": (1, 6, 6), "image": [-3, 5]}, "negative"),
        ({"x": (1, 6, 6), "image": [3, 5], "block": [0, 3]}, "block_shape is 0 along axis 2"),
    ],
)
def test_feeds_that_do_not_fit(feeds: dict[str, Any], message: str) -> None:
    has_block_input = "block" in feeds
    arrays = {k: np.asarray(v) for k, v in feeds.items() if k != "x"}
    module = lowering.compile(make_col2im("float32", has_block_input))
    with pytest.raises(lowering.InputError, match=message):
        module.run({"x": np.ones(feeds["x"], np.float32), **arrays})


def test_refusals() -> None:
    ints, x = ("int64", [2]), ("float32", [1, 6, 6])
    for inputs, message in (
        ([x, ("int64", ["k"]), ints], "image_shape has a symbolic length"),
        ([("float32", [1, 6]), ints, ints], "rank 2"),
        ([x, ints, ("int64", [2, 2])], "block_shape has rank 2"),
        ([x, ints, ("int64", [3])], "block_shape has 3"),
    ):
        with pytest.raises(lowering.NodeError, match=message):
            import_node("Col2Im", inputs)
    with raises("node.attribute_length_mismatch"):
        import_node("Col2Im", [x, ints, ints], strides=[1])
