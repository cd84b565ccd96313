"""Convolution and pooling with symbolic sizes: groups, strides, dilations, padding of every kind; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import lowering

from .expectations import Expectations, imported, model, value_info

RNG = np.random.default_rng(0)
AXES = ("h", "w", "d")


def reference(operator: str, inputs: list[np.ndarray], **attributes: Any) -> np.ndarray:
    """onnx's own evaluator, in float64."""
    names = [f"x{k}" for k in range(len(inputs))]
    node = helper.make_node(operator, names, ["y"], **attributes)
    ports = [value_info(n, "float64", a.shape) for n, a in zip(names, inputs)]
    output = value_info("y", "float64", [f"y{k}" for k in range(inputs[0].ndim)])
    feeds = {n: a.astype("float64") for n, a in zip(names, inputs)}
    return ReferenceEvaluator(model([node], ports, [output], 22)).run(None, feeds)[0]


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_conv(rank: int) -> None:
    x = RNG.standard_normal((2, 4, *(9, 8, 7)[:rank])).astype("float32")
    dims = [("n", 4, *AXES[:rank]), None, None]
    bias = RNG.standard_normal(6).astype("float32")
    case = Expectations()
    for group, stride, dilation, pads in ((1, 1, 1, (0, 0)), (1, 2, 1, (1, 0)), (2, 1, 2, (2, 2)), (1, 3, 2, (0, 2))):
        w = RNG.standard_normal((6, 4 // group, *(3, 3, 2)[:rank])).astype("float32")
        w /= w[0].size  # so that sums are small, and so are their errors
        how = {
            "group": group, "strides": [stride] * rank, "dilations": [dilation] * rank,
            "pads": [pads[0]] * rank + [pads[1]] * rank,
        }  # fmt: skip
        case.expect("Conv", [x, w, bias], reference("Conv", [x, w, bias], **how).astype("float32"), dims=dims, **how)
    case.check()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float64"))
def test_types(dtype: str) -> None:
    x, w = RNG.standard_normal((1, 4, 6, 5)).astype(dtype), RNG.standard_normal((4, 4, 3, 3)).astype(dtype)
    case = Expectations()
    case.expect("Conv", [x, w], reference("Conv", [x, w]).astype(dtype))
    case.expect("Conv", [x, w[:, :1]], reference("Conv", [x, w[:, :1]], group=4).astype(dtype), group=4)
    how: dict[str, Any] = {"kernel_shape": [2, 2]}
    case.expect("AveragePool", [x], reference("AveragePool", [x], **how).astype(dtype), **how)
    case.expect("MaxPool", [x], reference("MaxPool", [x], **how).astype(dtype), **how)
    case.expect("GlobalAveragePool", [x], x.astype("float64").mean(axis=(2, 3), keepdims=True).astype(dtype))
    case.check()


@pytest.mark.parametrize("auto_pad", ("SAME_UPPER", "SAME_LOWER", "VALID"))
def test_auto_pad(auto_pad: str) -> None:
    x, w = RNG.standard_normal((2, 3, 9, 8)).astype("float32"), RNG.standard_normal((4, 3, 3, 2)).astype("float32")
    case = Expectations()
    for stride in (1, 2, 3):
        how: dict[str, Any] = {"auto_pad": auto_pad, "strides": [stride, stride]}
        dims = [("n", 3, "h", "w")]
        case.expect("Conv", [x, w], reference("Conv", [x, w], **how).astype("float32"), dims=[*dims, None], **how)
        how["kernel_shape"] = [3, 2]
        case.expect("AveragePool", [x], reference("AveragePool", [x], **how).astype("float32"), dims=dims, **how)
    case.check()


def test_average_pool() -> None:
    """Which elements count: data, padding, and what ceil_mode reaches beyond it."""
    x = RNG.standard_normal((1, 2, 9, 8)).astype("float32")
    case = Expectations()
    for stride in (2, 3):
        for ceil in (0, 1):
            for include in (0, 1):
                how = {
                    "kernel_shape": [3, 2], "strides": [stride, stride], "pads": [1, 0, 1, 1], "ceil_mode": ceil,
                    "count_include_pad": include,
                }  # fmt: skip
                y = reference("AveragePool", [x], **how).astype("float32")
                case.expect("AveragePool", [x], y, dims=[("n", 2, "h", "w")], **how)
    case.check()


def test_max_pool_ignores_padding() -> None:
    x = -np.ones((1, 1, 3, 3), "float32")
    case = Expectations()
    case.expect("MaxPool", [x], -np.ones((1, 1, 4, 4), "float32"), kernel_shape=[2, 2], pads=[1, 1, 1, 1])
    case.expect("MaxPool", [x.astype("int8")], -np.ones((1, 1, 2, 2), "int8"), kernel_shape=[2, 2])
    case.check()


def test_constant_weights_can_be_packed() -> None:
    """A convolution without groups is a product with a weight matrix on the right."""
    from lowering.graph.model import load_model
    from lowering.importing.importer import import_model

    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20]> g (float[N, 3, H, W] x) => (float[N, 16, A, B] y) '
        "{ y = Conv<strides=[4, 4]>(x, w) }"
    )
    weight = RNG.standard_normal((16, 3, 4, 4)).astype("float32")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    result = import_model(load_model(proto))
    script = result.module["main"].script(show_meta=False)
    assert "R.permute_dims(weight_0" in script and "R.matmul(" in script
    assert [w.shape for w in result.weights.values()] == [(16, 48)]


def test_refusals() -> None:
    f = "float32"
    with pytest.raises(lowering.NodeError, match=r"channels.* is 4 and 6"):
        imported("Conv", [(f, (1, 4, 8, 8)), (f, (4, 3, 3, 3))], group=2)
    with pytest.raises(lowering.NodeError, match="is 5, which does not divide into group = 2"):
        imported("Conv", [(f, (1, 4, 8, 8)), (f, (5, 2, 3, 3))], group=2)
    with pytest.raises(lowering.NodeError, match="numbers for k1"):
        imported("Conv", [(f, (1, 4, 8, 8)), (f, (4, 4, "k", 3))])
    with pytest.raises(lowering.NodeError, match="Indices"):
        imported("MaxPool", [(f, (1, 4, 8, 8))], results=2, kernel_shape=[2, 2])
