"""GridSample and NonMaxSuppression compared with onnxruntime, for locations and boxes of every kind."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from tests.ops.expectations import make_model, value_info


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [0, 1])
def test_grid_sample(mode: str, padding: str, corners: int) -> None:
    """Locations include some far outside; "nearest" avoids midpoints between two elements."""
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], mode=mode, padding_mode=padding, align_corners=corners)
    inputs = [value_info("x", "float32", ["n", "c", "h", "w"]), value_info("grid", "float32", ["n", "p", "q", 2])]
    proto = make_model([node], inputs, [value_info("y", "float32", ["n", "c", "p", "q"])], 20)
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    rng = np.random.default_rng(0)
    for n, c, h, w in ((1, 3, 5, 7), (2, 20, 4, 1)):
        if w == 1 and corners and padding == "reflection":
            continue  # a single element cannot reflect locations
        feeds = {
            "x": rng.standard_normal((n, c, h, w)).astype(np.float32),
            "grid": rng.uniform(-2.5, 2.5, (n, 3, 6, 2)).astype(np.float32),
        }
        # Beyond a border onnxruntime moves both coordinates if one is outside; the standard moves that one.
        as_standard = mode == "cubic" and padding == "border"
        (want,) = (ReferenceEvaluator(proto) if as_standard else session).run(None, feeds)
        np.testing.assert_allclose(np.asarray(module.run(feeds)["y"]), want, rtol=1e-4, atol=1e-4)


def test_locations_that_are_not_finite() -> None:
    node = helper.make_node("GridSample", ["x", "grid"], ["y"])
    inputs = [value_info("x", "float32", [1, 1, 3, 3]), value_info("grid", "float32", [1, 1, 4, 2])]
    module = lowering.compile(make_model([node], inputs, [value_info("y", "float32", [1, 1, 1, 4])], 20))
    grid = np.asarray([[[[np.nan, 0], [np.inf, 0], [-1e30, 1e30], [0, 0]]]], np.float32)
    actual = np.asarray(module.run({"x": np.ones((1, 1, 3, 3), np.float32), "grid": grid})["y"]).ravel()
    assert actual[3] == 1 and actual[2] == 0


@pytest.mark.parametrize("centered", [0, 1])
@pytest.mark.parametrize("constant", [True, False])
def test_non_max_suppression(centered: int, constant: bool) -> None:
    names = ["most", "iou", "least"]
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", *names], ["y"], center_point_box=centered)
    values = [np.asarray([4], np.int64), np.asarray([0.4], np.float32), np.asarray([0.2], np.float32)]
    inputs = [value_info("boxes", "float32", ["n", "b", 4]), value_info("scores", "float32", ["n", "c", "b"])]
    if not constant:
        inputs += [value_info(name, v.dtype.name, [1]) for name, v in zip(names, values)]
    constants = [numpy_helper.from_array(v, name) for name, v in zip(names, values)] if constant else []
    proto = make_model([node], inputs, [value_info("y", "int64", ["k", 3])], 11, constants)
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    rng = np.random.default_rng(1)
    for n, c, b in ((1, 1, 1), (2, 3, 30), (1, 2, 0)):
        feeds = {
            "boxes": rng.uniform(0, 1, (n, b, 4)).astype(np.float32),
            "scores": rng.uniform(0, 1, (n, c, b)).astype(np.float32),
        } | ({} if constant else dict(zip(names, values)))
        (want,) = session.run(None, feeds)
        np.testing.assert_array_equal(np.asarray(module.run(feeds)["y"]), want)


def test_scores_that_are_nan_are_never_chosen() -> None:
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["y"])
    inputs = [value_info("boxes", "float32", [1, 3, 4]), value_info("scores", "float32", [1, 1, 3])]
    module = lowering.compile(make_model([node], inputs, [value_info("y", "int64", ["k", 3])], 11,
                              [numpy_helper.from_array(np.asarray([2**62]), "most")]))  # fmt: skip
    boxes = np.asarray([[[0, 0, 1, 1], [2, 2, 3, 3], [np.nan, 0, 1, 1]]], np.float32)
    scores = np.asarray([[[np.nan, 0.5, 0.7]]], np.float32)
    assert np.asarray(module.run({"boxes": boxes, "scores": scores})["y"]).tolist() == [[0, 0, 2], [0, 0, 1]]
