"""Transposed convolutions compared with the definition: every input element adds its kernel to the result."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import LoweringError


def make_model(
    x: list[int | str], w: np.ndarray, b: np.ndarray | None = None, constant: bool = True, **attributes: Any
) -> onnx.ModelProto:
    weights = {"w": w, **({} if b is None else {"b": b})}
    kind = helper.np_dtype_to_tensor_dtype(w.dtype)
    inputs = [helper.make_tensor_value_info("x", kind, x)]
    if not constant:
        inputs += [helper.make_tensor_value_info(n, kind, a.shape) for n, a in weights.items()]
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", *weights], ["y"], **attributes)],
        "upsampling",
        inputs,
        [helper.make_tensor_value_info("y", kind, [f"y{k}" for k in range(len(x))])],
        [numpy_helper.from_array(a, n) for n, a in weights.items()] if constant else [],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)


def compute_expected(
    x: np.ndarray,
    w: np.ndarray,
    b: np.ndarray | None,
    strides: Any,
    dilations: Any,
    pads: Any,
    padding: Any,
    group: int,
) -> np.ndarray:
    x, w = x.astype(np.float64), w.astype(np.float64)
    n, c, *sizes = x.shape
    kernel, m = w.shape[2:], w.shape[1]
    full = [(d - 1) * s + (k - 1) * e + 1 + p for d, s, k, e, p in zip(sizes, strides, kernel, dilations, padding)]
    y = np.zeros((n, m * group, *full))
    for g, ks in itertools.product(range(group), itertools.product(*map(range, kernel))):
        channels = slice(g * c // group, (g + 1) * c // group)
        contribution = np.einsum("nc...,cm->nm...", x[:, channels], w[(channels, slice(None), *ks)])
        where = [slice(k * e, k * e + (d - 1) * s + 1, s) for k, e, d, s in zip(ks, dilations, sizes, strides)]
        y[(slice(None), slice(g * m, (g + 1) * m), *where)] += contribution
    a = len(sizes)
    y = y[(..., *(slice(pads[k], f - pads[a + k]) for k, f in enumerate(full)))]
    return y if b is None else y + b.reshape(-1, *[1] * a)


CASES = [
    # kernel, strides, dilations, pads, output_padding, group
    ((2, 2), (2, 2), (1, 1), (0, 0, 0, 0), (0, 0), 1),
    ((4, 4), (2, 2), (1, 1), (1, 1, 1, 1), (0, 0), 1),
    ((3, 3), (2, 2), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    ((3, 2), (1, 3), (1, 1), (0, 1, 2, 0), (0, 2), 2),
    ((2, 3), (2, 1), (3, 2), (1, 0, 0, 2), (0, 1), 1),
    ((3, 3), (2, 2), (1, 1), (0, 1, 1, 0), (0, 0), 4),
    ((16,), (8,), (1,), (4, 4), (0,), 1),
    ((5,), (3,), (2,), (2, 1), (2,), 2),
    ((2, 3, 2), (2, 1, 2), (1, 1, 1), (0, 1, 0, 1, 0, 0), (0, 0, 1), 1),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("kernel, strides, dilations, pads, padding, group", CASES)
def test_the_definition(
    kernel: Any, strides: Any, dilations: Any, pads: Any, padding: Any, group: int, constant: bool
) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 12 // group, *kernel)).astype(np.float32)
    b = rng.standard_normal(12).astype(np.float32)
    axes = len(kernel)
    module = lowering.compile(
        make_model(
            ["n", 8, *(f"d{k}" for k in range(axes))], w, b, constant, kernel_shape=kernel, strides=strides,
            dilations=dilations, pads=pads, output_padding=padding, group=group,
        )
    )  # fmt: skip
    for n, size in ((1, 7), (3, 4)):
        x = rng.standard_normal((n, 8, *[size + k for k in range(axes)])).astype(np.float32)
        y = module.bind({"x": x} if constant else {"x": x, "w": w, "b": b})()["y"]
        right = compute_expected(x, w, b, strides, dilations, pads, padding, group)
        np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("auto, before", [("SAME_UPPER", 0), ("SAME_LOWER", 1)])
def test_padding_that_keeps_the_size(auto: str, before: int) -> None:
    """An odd padding element goes after with SAME_UPPER, before with SAME_LOWER."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 5, 3, 3)).astype(np.float32)
    x = rng.standard_normal((1, 3, 6, 7)).astype(np.float32)
    y = lowering.compile(make_model([1, 3, 6, 7], w, strides=[2, 2], auto_pad=auto)).bind({"x": x})()["y"]
    pads = [before, before, 1 - before, 1 - before]
    np.testing.assert_allclose(y, compute_expected(x, w, None, (2, 2), (1, 1), pads, (0, 0), 1), rtol=1e-4, atol=1e-4)


def test_a_requested_output_shape() -> None:
    """A smaller shape crops the result on both sides; a larger one pads with zeros after it."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 5, 3, 3)).astype(np.float32)
    x = rng.standard_normal((1, 3, 4, 4)).astype(np.float32)
    y = lowering.compile(make_model([1, 3, 4, 4], w, strides=[2, 2], output_shape=[8, 12])).bind({"x": x})()["y"]
    right = compute_expected(x, w, None, (2, 2), (1, 1), (1, 0, 0, 0), (0, 3), 1)
    np.testing.assert_allclose(y, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_types(dtype: str) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 4, 2, 2)).astype(dtype)
    x = rng.standard_normal((2, 8, 5, 3)).astype(dtype)
    y = lowering.compile(make_model(["n", 8, "h", "w"], w, strides=[2, 2])).bind({"x": x})()["y"]
    right = compute_expected(x, w, None, (2, 2), (1, 1), (0,) * 4, (0, 0), 1)
    np.testing.assert_allclose(y.astype(np.float64), right, rtol=2e-2 if dtype == "float16" else 1e-12, atol=2e-2)


@pytest.mark.parametrize(
    "attributes, text",
    [
        ({"strides": [2]}, "strides is"),
        ({"strides": [2, 2], "output_padding": [2, 0]}, "output_padding is"),
        ({"group": 3}, "group"),
        ({"strides": [2**20, 2]}, "the maximum is 16384"),
        ({"dilations": [1, 2**20]}, "the maximum is 16384"),
        ({"kernel_shape": [3, 3]}, "kernel_shape is"),
        ({"pads": [9, 9, 9, 9]}, "pads leave"),
        ({"output_shape": [99]}, "output_shape is"),
    ],
)
def test_refusals(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(LoweringError, match=text):
        lowering.compile(make_model([1, 8, 5, 5], np.ones((8, 4, 2, 2), np.float32), **attributes))
