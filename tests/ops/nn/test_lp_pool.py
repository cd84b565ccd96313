"""LpPool and GlobalLpPool of symbolic sizes, compared with onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import lowering
from tests.ops.expectations import import_node, make_model, value_info
from tests.support.error_codes import raises


@pytest.mark.parametrize("p", [1, 2, 3, 10])
def test_lp_pool(p: int) -> None:
    node = helper.make_node("LpPool", ["x"], ["y"], p=p, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
    dims = ["n", "c", "h", "w"]
    proto = make_model(
        [node], [value_info("x", "float32", dims)], [value_info("y", "float32", ["a", "b", "d", "e"])], 18
    )
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    for shape in ((1, 3, 7, 9), (2, 17, 4, 5)):
        feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        (want,) = session.run(None, feeds)
        np.testing.assert_allclose(module.run(feeds)["y"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [1, 2, 5])
def test_global_lp_pool(p: int) -> None:
    """The pool follows a convolution, whose channels are last."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("GlobalLpPool", ["c"], ["y"], p=p)]
    weight = np.random.default_rng(1).standard_normal((5, 3, 1, 1)).astype(np.float32)
    proto = make_model(nodes, [value_info("x", "float32", ["n", 3, "h", "w"])],
                       [value_info("y", "float32", ["a", 5, 1, 1])], 18,
                       [numpy_helper.from_array(weight, "w")])  # fmt: skip
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    for shape in ((1, 3, 7, 9), (2, 3, 1, 1)):
        feeds = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        np.testing.assert_allclose(module.run(feeds)["y"], session.run(None, feeds)[0], rtol=1e-4, atol=1e-5)


def test_global_refusals() -> None:
    with raises("node.value_out_of_range"):
        import_node("GlobalLpPool", [("float32", (1, 2, 5, 5))], opset=18, p=0)


@pytest.mark.parametrize(
    "attributes, message", [({"p": 0}, "attribute p is 0"), ({"kernel_shape": [2]}, "kernel_shape")]
)
def test_refusals(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(lowering.NodeError, match=message):
        import_node("LpPool", [("float32", (1, 2, 5, 5))], opset=18, **{"kernel_shape": [2, 2], **attributes})
