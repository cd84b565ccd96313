"""Resize: the standard's cases with constant scales and sizes, symbolic sizes, and between convolutions."""

from __future__ import annotations

import itertools

import node_cases
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.errors import InputError, NodeError

from .expectations import model, value_info

CASES = [case for case in node_cases.cases("Resize") if not case.expanded]


@pytest.mark.parametrize("part", range(4))
def test_cases_with_constants(part: int) -> None:
    for case in CASES[part::4]:
        node_cases.run(node_cases.with_constants(case))


def resized(scales: list[float], rank: int = 4, dtype: str = "float32", **attributes: object) -> onnx.ModelProto:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
    constants = [numpy_helper.from_array(np.asarray(scales, np.float32), "scales")]
    dims = [f"d{k}" for k in range(rank)]
    return model([node], [value_info("x", dtype, dims)], [value_info("y", dtype, [f"y{k}" for k in range(rank)])], 19,
                 constants)  # fmt: skip


FORMS = list(itertools.product(
    ("nearest", "linear", "cubic"), ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"),
))  # fmt: skip


@pytest.mark.parametrize("mode, coordinates", FORMS)
def test_symbolic_sizes(mode: str, coordinates: str) -> None:
    proto = resized([1.0, 1.0, 2.0, 0.75], mode=mode, coordinate_transformation_mode=coordinates)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    rng = np.random.default_rng(0)
    for shape in ((1, 2, 3, 8), (2, 1, 5, 4), (1, 3, 1, 12)):
        x = rng.standard_normal(shape).astype(np.float32)
        (want,) = reference.run(None, {"x": x})
        np.testing.assert_allclose(np.asarray(module(x=x)["y"]), want, rtol=1e-5, atol=1e-5)


def test_half_precision_and_bytes() -> None:
    rng = np.random.default_rng(1)
    for dtype in ("float16", "uint8"):
        module = lowering.compile(resized([1.0, 2.0], 2, dtype, mode="linear"))
        x = (rng.random((4, 6)) * 200).astype(dtype)
        wide = ReferenceEvaluator(resized([1.0, 2.0], 2, mode="linear")).run(None, {"x": x.astype(np.float32)})[0]
        assert np.abs(np.asarray(module(x=x)["y"]).astype(np.float64) - wide).max() <= (1 if dtype == "uint8" else 0.1)


def test_scales_of_the_run() -> None:
    """Of symbolic sizes; those that make no size are an error."""
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    inputs = [value_info("x", "float32", ["a", "b"]), value_info("scales", "float32", [2])]
    proto = model([node], inputs, [value_info("y", "float32", ["p", "q"])], 19)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    x = np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)
    for scales in ([1.0, 2.0], [0.5, 1.5], [4.0, 0.25]):
        feeds = {"x": x, "scales": np.asarray(scales, np.float32)}
        (want,) = reference.run(None, feeds)
        np.testing.assert_allclose(np.asarray(module.run(feeds)["y"]), want, rtol=1e-5, atol=1e-5)
    for hostile in (0.0, -1.0, np.nan, np.inf, 1e30):
        with pytest.raises(InputError):
            module.run({"x": x, "scales": np.asarray([1.0, hostile], np.float32)})


def test_between_convolutions() -> None:
    """With channels last, as convolutions compute."""
    rng = np.random.default_rng(2)
    weights = {n: rng.standard_normal((8, 8, 3, 3)).astype(np.float32) / 8 for n in ("w1", "w2")}
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Resize", ["a", "", "scales"], ["b"], mode="linear"),
        helper.make_node("Conv", ["b", "w2"], ["y"]),
    ]
    constants = [numpy_helper.from_array(w, n) for n, w in weights.items()]
    constants.append(numpy_helper.from_array(np.asarray([1, 1, 2, 2], np.float32), "scales"))
    dims = ["n", 8, "h", "w"]
    proto = model(nodes, [value_info("x", "float32", dims)], [value_info("y", "float32", ["n", 8, "p", "q"])], 19,
                  constants)  # fmt: skip
    module, x = lowering.compile(proto), rng.standard_normal((2, 8, 5, 7)).astype(np.float32)
    (want,) = ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(np.asarray(module(x=x)["y"]), want, rtol=1e-4, atol=1e-4)
    assert sum("transpose" in kernel.name for kernel in module.manifest.kernels) == 2


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"mode": "other"}, "attribute mode is 'other'"),
        ({"mode": "nearest", "antialias": 1}, "antialias is 1 in mode 'nearest'"),
        ({"mode": "linear", "coordinate_transformation_mode": "x"}, "coordinate_transformation_mode is 'x'"),
        ({"mode": "linear", "axes": [1, 1]}, "names an axis twice"),
    ],
)
def test_refusals(attributes: dict[str, object], words: str) -> None:
    with pytest.raises(NodeError, match=words):
        lowering.compile(resized([1.0, 2.0], 2, **attributes))
