"""3 x 3 convolutions by Winograd's algorithm: sizes, epilogues, machines, and what each output depends on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import lowering
from tests.ops.expectations import make_model, value_info
from tests.ops.nn.test_conv import run_reference
from tests.support.placed_arrays import guarded, unaligned

RNG = np.random.default_rng(0)
TARGETS = ("cpu", "cpu:x86-64-v3")


def make_convolution(
    c: int, m: int, pads: int = 0, dims: tuple[str | int, ...] = ("n", "h", "w"), epilogue: bool = False
) -> tuple[onnx.ModelProto, np.ndarray]:
    """Return Conv(x) of channels-last data, and its weights; with an epilogue Relu(Conv(x) + bias + r)."""
    w = (RNG.standard_normal((m, c, 3, 3)) / np.sqrt(9 * c)).astype("float32")
    ports = [value_info("x", "float32", (*dims, c))]
    weights = {"w": w, "b": RNG.standard_normal(m).astype("float32")}
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["t", "w", "b"], ["z"], pads=[pads] * 4),
        helper.make_node("Transpose", ["z"], ["l"], perm=[0, 2, 3, 1]),
    ]
    if epilogue:
        ports.append(value_info("r", "float32", ("n", "rows", "columns", m)))
        nodes += [helper.make_node("Add", ["l", "r"], ["s"]), helper.make_node("Relu", ["s"], ["y"])]
    else:
        nodes[-1].output[0] = "y"
    proto = make_model(nodes, ports, [value_info("y", "float32", "abcd")], 20)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return proto, weights


def convolve(x: np.ndarray, weights: dict[str, np.ndarray], pads: int) -> np.ndarray:
    """Return Conv of channels-last data in float64."""
    inputs = [x.transpose(0, 3, 1, 2), weights["w"], weights["b"]]
    return run_reference("Conv", inputs, pads=[pads] * 4).transpose(0, 2, 3, 1)


def list_rules(model: Any) -> set[str]:
    return {kernel.schedule for kernel in model.manifest.kernels}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("c", "m"), ((16, 16), (20, 19), (37, 70), (64, 128)))
def test_equals_the_reference(target: str, c: int, m: int) -> None:
    """Symbolic sizes, odd and even; arrays that end at a page, begin at one, and are not aligned; both numbers of
    threads. An error is at most 5e-7 of what its terms add up to."""
    proto, weights = make_convolution(c, m, epilogue=True)
    model = lowering.compile(proto, target)
    assert "winograd" in list_rules(model)
    for n, h, w in ((1, 3, 3), (2, 8, 9), (1, 15, 4), (3, 20, 21)):
        x = RNG.standard_normal((n, h, w, c)).astype("float32")
        r = RNG.standard_normal((n, h - 2, w - 2, m)).astype("float32")
        expected = np.maximum(convolve(x, weights, 0) + r, 0)
        terms = convolve(np.abs(x), {name: np.abs(array) for name, array in weights.items()}, 0) + np.abs(r)
        for copy in (unaligned, lambda a: guarded(a, True), lambda a: guarded(a, False)):
            for threads in (1, 2):
                y = model.run({"x": copy(x), "r": copy(r)}, threads=threads)["y"]
                assert (np.abs(y - expected) <= 5e-7 * terms).all(), (n, h, w, threads)


def test_no_images() -> None:
    proto, _ = make_convolution(16, 16, pads=1)
    assert lowering.compile(proto).run({"x": np.zeros((0, 6, 7, 16), "float32")})["y"].shape == (0, 6, 7, 16)


@pytest.mark.parametrize("value", (np.nan, np.inf, 3e38))
def test_an_output_depends_on_its_window_alone(value: float) -> None:
    """Every pixel of odd and even sizes: what is outside of a window changes no bit, and what is in it is not lost."""
    proto, _ = make_convolution(16, 16, pads=1)
    model = lowering.compile(proto)
    for h, w in ((5, 6), (4, 7)):
        clean = RNG.standard_normal((1, h, w, 16)).astype("float32")
        expected = model.run({"x": clean})["y"]
        for row in range(h):
            for column in range(w):
                x = clean.copy()
                x[0, row, column] = value
                y = model.run({"x": x})["y"]
                window = np.zeros((h, w), bool)
                window[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2] = True
                np.testing.assert_array_equal(y[0, ~window], expected[0, ~window])
                assert (y[0, window] != expected[0, window]).all() and (
                    value == 3e38 or not np.isfinite(y[0, window]).any()
                )


def test_an_epilogue_of_another_shape_is_apart() -> None:
    """A sum that repeats the convolution for each image does not fit its kernel, which is still used."""
    w = (RNG.standard_normal((32, 32, 3, 3)) / 17).astype("float32")
    nodes = [helper.make_node("Conv", ["k", "w"], ["z"], pads=[1] * 4), helper.make_node("Add", ["z", "x"], ["y"])]
    ports = [value_info("k", "float32", (1, 32, "h", "w")), value_info("x", "float32", ("n", 32, "h", "w"))]
    proto = make_model(nodes, ports, [value_info("y", "float32", "abcd")], 20)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    model = lowering.compile(proto)
    assert "winograd" in list_rules(model) and "reduction" not in list_rules(model)
    k, x = (RNG.standard_normal((n, 32, 9, 8)).astype("float32") for n in (1, 3))
    expected = run_reference("Conv", [k, w], pads=[1] * 4) + x
    np.testing.assert_allclose(model.run({"k": k, "x": x})["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "attributes", "dims"),
    (
        ((16, 15, 3, 3), {}, ("n", "h", "w")),  # few channels
        ((15, 16, 3, 3), {}, ("n", "h", "w")),
        ((16, 16, 3, 3), {"strides": [2, 1]}, ("n", "h", "w")),
        ((16, 16, 3, 3), {"dilations": [1, 2]}, ("n", "h", "w")),
        ((16, 16, 3, 2), {}, ("n", "h", "w")),
        ((32, 16, 3, 3), {"group": 2}, ("n", "h", "w")),
        ((64, 64, 3, 3), {"pads": [1] * 4}, ("n", 7, 7)),  # few tiles
        ((64, 64, 3, 3), {"pads": [1] * 4}, ("n", "h", 1)),
    ),
)
def test_others_are_direct(shape: tuple[int, ...], attributes: dict[str, Any], dims: tuple[str | int, ...]) -> None:
    """Other windows, and those where the transforms do not pay off."""
    weight = RNG.standard_normal(shape).astype("float32")
    channels = shape[1] * attributes.get("group", 1)
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    ports = [value_info("x", "float32", (dims[0], channels, *dims[1:]))]
    proto = make_model([node], ports, [value_info("y", "float32", "abcd")], 20)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    assert "winograd" not in list_rules(lowering.compile(proto))
