"""RoiAlign and AffineGrid for symbolic sizes, half precision, and regions of every kind."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.errors import InputError
from tests.ops.expectations import import_node, make_model, value_info
from tests.support.error_codes import raises


def make_roi_model(dtype: str = "float32", **attributes: object) -> object:
    node = helper.make_node("RoiAlign", ["x", "rois", "batch"], ["y"], **attributes)
    inputs = [value_info("x", dtype, ["n", "c", "h", "w"]), value_info("rois", dtype, ["r", 4]),
              value_info("batch", "int64", ["r"])]  # fmt: skip
    return make_model([node], inputs, [value_info("y", dtype, ["r", "c", "p", "q"])], 16)


def draw_regions(rng: np.random.Generator, count: int, height: int, width: int) -> np.ndarray:
    """Draw regions, some of them partly outside."""
    corners = np.sort(rng.uniform(-0.3, 1.3, (count, 2, 2)), axis=1) * (width, height)
    return corners.reshape(count, 4).astype(np.float32)


@pytest.mark.parametrize("mode, coordinates, ratio", [
    ("avg", "half_pixel", 0), ("avg", "output_half_pixel", 2), ("max", "output_half_pixel", 0),
])  # fmt: skip
def test_roi_align(mode: str, coordinates: str, ratio: int) -> None:
    proto = make_roi_model(mode=mode, coordinate_transformation_mode=coordinates, sampling_ratio=ratio, output_height=3,
                           output_width=2, spatial_scale=0.5)  # fmt: skip
    module, session = lowering.compile(proto), onnxruntime.InferenceSession(proto.SerializeToString())
    rng = np.random.default_rng(0)
    for n, c, h, w, r in ((1, 3, 9, 7, 5), (3, 20, 4, 1, 8), (2, 1, 5, 5, 0)):
        batch = rng.integers(0, n, r)
        feeds = {"x": rng.standard_normal((n, c, h, w)).astype(np.float32),
                 "rois": 2 * draw_regions(rng, r, h, w), "batch": batch}  # fmt: skip
        (want,) = session.run(None, feeds)
        np.testing.assert_allclose(np.asarray(module.run(feeds)["y"]), want, rtol=1e-4, atol=1e-5)


def test_regions_of_half_precision() -> None:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((1, 4, 8, 8)).astype(np.float16), "rois": np.asarray([[1, 1, 6, 5]], np.float16),
             "batch": np.zeros(1, np.int64)}  # fmt: skip
    wide = {k: v.astype(np.float32) if v.dtype == np.float16 else v for k, v in feeds.items()}
    expected = np.asarray(lowering.compile(make_roi_model(output_height=2, output_width=2)).run(wide)["y"])
    actual = np.asarray(lowering.compile(make_roi_model("float16", output_height=2, output_width=2)).run(feeds)["y"])
    np.testing.assert_allclose(actual.astype(np.float32), expected, rtol=2e-3, atol=2e-3)


def test_regions_that_are_hostile() -> None:
    """Batches out of range, regions that are not finite, and regions with too many samples."""
    module = lowering.compile(make_roi_model(output_height=2, output_width=2))
    x, good = np.ones((2, 1, 4, 4), np.float32), np.asarray([[0, 0, 3, 3]], np.float32)
    for batch in (2, -1, 2**62):
        with raises("run.index_out_of_range"):
            module.run({"x": x, "rois": good, "batch": np.asarray([batch])})
    with raises("roi_align.too_many_samples"):
        module.run({"x": x, "rois": np.asarray([[0, 0, 1e30, 3]], np.float32), "batch": np.zeros(1, np.int64)})
    for odd in (np.nan, -np.inf, -2):  # the last region is upside down
        rois = np.asarray([[0, 0, odd, odd]], np.float32)
        assert not np.asarray(module.run({"x": x, "rois": rois, "batch": np.zeros(1, np.int64)})["y"]).any()


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("axes", [2, 3])
def test_affine_grid(axes: int, corners: int) -> None:
    """Sizes are inputs at run time."""
    node = helper.make_node("AffineGrid", ["theta", "size"], ["y"], align_corners=corners)
    inputs = [value_info("theta", "float32", ["n", axes, axes + 1]), value_info("size", "int64", [axes + 2])]
    proto = make_model([node], inputs, [value_info("y", "float32", ["n", *(f"d{k}" for k in range(axes + 1))])], 20)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    rng = np.random.default_rng(2)
    for size in ((2, 3, 4, 5, 6)[: axes + 2], (1, 1, 2, 3, 2)[: axes + 2]):
        feeds = {"theta": rng.standard_normal((size[0], axes, axes + 1)).astype(np.float32), "size": np.asarray(size)}
        (want,) = reference.run(None, feeds)
        np.testing.assert_allclose(np.asarray(module.run(feeds)["y"]), want, rtol=1e-4, atol=1e-5)
    for wrong in ((3, 3, 4, 5, 6), (2, 3, -4, 5, 6), (2, 3, 2**40, 2**40, 6)):
        with pytest.raises(InputError):
            module.run({"theta": np.ones((2, axes, axes + 1), np.float32), "size": np.asarray(wrong[: axes + 2])})


def test_refusals() -> None:
    with raises("roi_align.attribute_unsupported"):
        import_node("RoiAlign", [("float32", [1, 1, 4, 4]), ("float32", [2, 4]), ("int64", [2])], opset=16, mode="sum")
    with raises("node.dtype_unsupported"):
        import_node("RoiAlign", [("float32", [1, 1, 4, 4]), ("int64", [2, 4]), ("int64", [2])], opset=16)
    with raises("affine_grid.input_unsupported"):
        import_node("AffineGrid", [("float32", [2, 3]), ("int64", [4])], opset=20)
