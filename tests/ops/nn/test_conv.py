"""Convolution and pooling with symbolic sizes: groups, strides, dilations, padding of every kind; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import lowering
from tests.ops.expectations import Expectations, import_node, make_model, value_info
from tests.support.error_codes import raises

RNG = np.random.default_rng(0)
AXES = ("h", "w", "d")


def run_reference(operator: str, inputs: list[np.ndarray], **attributes: Any) -> np.ndarray:
    """Run onnx's own evaluator in float64."""
    names = [f"x{k}" for k in range(len(inputs))]
    node = helper.make_node(operator, names, ["y"], **attributes)
    ports = [value_info(n, "float64", a.shape) for n, a in zip(names, inputs)]
    output = value_info("y", "float64", [f"y{k}" for k in range(inputs[0].ndim)])
    feeds = {n: a.astype("float64") for n, a in zip(names, inputs)}
    return ReferenceEvaluator(make_model([node], ports, [output], 22)).run(None, feeds)[0]


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_conv(rank: int) -> None:
    x = RNG.standard_normal((2, 4, *(9, 8, 7)[:rank])).astype("float32")
    dims = [("n", 4, *AXES[:rank]), None, None]
    bias = RNG.standard_normal(6).astype("float32")
    case = Expectations()
    for group, stride, dilation, pads in ((1, 1, 1, (0, 0)), (1, 2, 1, (1, 0)), (2, 1, 2, (2, 2)), (1, 3, 2, (0, 2))):
        w = RNG.standard_normal((6, 4 // group, *(3, 3, 2)[:rank])).astype("float32")
        w /= w[0].size  # keeps the accumulators and their errors small
        how = {
            "group": group, "strides": [stride] * rank, "dilations": [dilation] * rank,
            "pads": [pads[0]] * rank + [pads[1]] * rank,
        }  # fmt: skip
        case.expect(
            "Conv", [x, w, bias], run_reference("Conv", [x, w, bias], **how).astype("float32"), dims=dims, **how
        )
    case.check()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float64"))
def test_types(dtype: str) -> None:
    x, w = RNG.standard_normal((1, 4, 6, 5)).astype(dtype), RNG.standard_normal((4, 4, 3, 3)).astype(dtype)
    case = Expectations()
    case.expect("Conv", [x, w], run_reference("Conv", [x, w]).astype(dtype))
    case.expect("Conv", [x, w[:, :1]], run_reference("Conv", [x, w[:, :1]], group=4).astype(dtype), group=4)
    how: dict[str, Any] = {"kernel_shape": [2, 2]}
    case.expect("AveragePool", [x], run_reference("AveragePool", [x], **how).astype(dtype), **how)
    case.expect("MaxPool", [x], run_reference("MaxPool", [x], **how).astype(dtype), **how)
    case.expect("GlobalAveragePool", [x], x.astype("float64").mean(axis=(2, 3), keepdims=True).astype(dtype))
    case.check()


@pytest.mark.parametrize("auto_pad", ("SAME_UPPER", "SAME_LOWER", "VALID"))
def test_auto_pad(auto_pad: str) -> None:
    x, w = RNG.standard_normal((2, 3, 9, 8)).astype("float32"), RNG.standard_normal((4, 3, 3, 2)).astype("float32")
    case = Expectations()
    for stride in (1, 2, 3):
        how: dict[str, Any] = {"auto_pad": auto_pad, "strides": [stride, stride]}
        dims = [("n", 3, "h", "w")]
        case.expect("Conv", [x, w], run_reference("Conv", [x, w], **how).astype("float32"), dims=[*dims, None], **how)
        how["kernel_shape"] = [3, 2]
        case.expect("AveragePool", [x], run_reference("AveragePool", [x], **how).astype("float32"), dims=dims, **how)
    case.check()


def test_average_pool() -> None:
    """The count of elements: data, padding, and elements that ceil_mode reaches beyond it."""
    x = RNG.standard_normal((1, 2, 9, 8)).astype("float32")
    case = Expectations()
    for stride in (2, 3):
        for ceil in (0, 1):
            for include in (0, 1):
                how = {
                    "kernel_shape": [3, 2], "strides": [stride, stride], "pads": [1, 0, 1, 1], "ceil_mode": ceil,
                    "count_include_pad": include,
                }  # fmt: skip
                y = run_reference("AveragePool", [x], **how).astype("float32")
                case.expect("AveragePool", [x], y, dims=[("n", 2, "h", "w")], **how)
    case.check()


def test_max_pool_ignores_padding() -> None:
    x = -np.ones((1, 1, 3, 3), "float32")
    case = Expectations()
    case.expect("MaxPool", [x], -np.ones((1, 1, 4, 4), "float32"), kernel_shape=[2, 2], pads=[1, 1, 1, 1])
    case.expect("MaxPool", [x.astype("int8")], -np.ones((1, 1, 2, 2), "int8"), kernel_shape=[2, 2])
    case.check()


def test_rules() -> None:
    """Convolutions are matmuls with packed weights where groups have several channels, else loops over windows."""
    shapes = {"dense": (16, 8, 3, 3), "one": (16, 8, 1, 1), "groups": (16, 2, 3, 3), "depthwise": (8, 1, 5, 5)}
    rules = {"dense": "matmul", "one": "matmul", "groups": "matmul", "depthwise": "windows"}
    for name, shape in shapes.items():
        weight, x = RNG.standard_normal(shape).astype("float32"), RNG.standard_normal((2, 8, 9, 7)).astype("float32")
        how: dict[str, Any] = {"group": 8 // shape[1], "pads": [shape[2] // 2] * 4}
        node = helper.make_node("Conv", ["x", "w"], ["y"], **how)
        proto = make_model(
            [node], [value_info("x", "float32", ("n", 8, "h", "w"))], [value_info("y", "float32", "abcd")], 20
        )
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
        compiled = lowering.compile(proto)
        assert rules[name] in {kernel.schedule for kernel in compiled.manifest.kernels}, name
        expected = run_reference("Conv", [x, weight], **how)
        np.testing.assert_allclose(compiled.run({"x": x})["y"], expected, rtol=2e-5, atol=2e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("channels", (37, 1, 3, 16, 24))
def test_windows(channels: int) -> None:
    """Every border: windows larger than the data, dilated windows, windows at the ends, NaN and infinity in pools."""
    case = Expectations()
    sizes = ((9, 3, 1, 1, 1), (13, 5, 2, 1, 2), (4, 3, 1, 3, 3), (2, 5, 1, 1, 2), (66, 3, 1, 1, 0))
    for size, kernel, stride, dilation, pad in sizes:
        x = RNG.standard_normal((2, channels, 5, size)).astype("float32")
        dims = [("n", channels, "h", "w"), None]
        how: dict[str, Any] = {"strides": [stride] * 2, "dilations": [dilation] * 2, "pads": [pad] * 4}
        if channels > 1 and (size > 2 or pad):
            w = RNG.standard_normal((channels, 1, min(kernel, 5), kernel)).astype("float32") / kernel**2
            expected = run_reference("Conv", [x, w], group=channels, **how).astype("float32")
            case.expect("Conv", [x, w], expected, dims=dims, group=channels, **how)
        if pad < kernel:
            x = x.copy()
            x[0, 0, 2, 1], x[1, 0, 0, 0], x[1, -1] = np.nan, np.inf, -np.inf
            how["kernel_shape"] = [kernel] * 2
            case.expect("MaxPool", [x], _pool_max(x, kernel, stride, dilation, pad), dims=dims[:1], **how)
    case.check()


def _pool_max(x: np.ndarray, kernel: int, stride: int, dilation: int, pad: int) -> np.ndarray:
    """Return MaxPool, with NaN where a window contains one."""
    padded = np.pad(x, [(0, 0)] * 2 + [(pad, pad)] * 2, constant_values=-np.inf)
    reach = dilation * (kernel - 1) + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, (reach, reach), axis=(2, 3))
    return windows[:, :, ::stride, ::stride, ::dilation, ::dilation].max(axis=(4, 5))


def test_refusals() -> None:
    f = "float32"
    with raises("node.size_mismatch"):
        import_node("Conv", [(f, (1, 4, 8, 8)), (f, (4, 3, 3, 3))], group=2)
    with raises("node.size_not_divisible"):
        import_node("Conv", [(f, (1, 4, 8, 8)), (f, (5, 2, 3, 3))], group=2)
    with raises("conv.shape_unsupported"):
        import_node("Conv", [(f, (1, 4, 8, 8)), (f, (4, 4, "k", 3))])
