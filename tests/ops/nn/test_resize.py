"""Resize: the standard's cases with constant scales and sizes, symbolic sizes, and between convolutions."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from lowering.errors import InputError, NodeError
from tests.cases import node_cases
from tests.ops.expectations import make_model, value_info

CASES = [case for case in node_cases.cases("Resize") if not case.expanded]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(4))
def test_cases_with_constants(first: int) -> None:
    for case in CASES[first::4]:
        node_cases.run(node_cases.with_constants(case))


def make_resize(scales: list[float], rank: int = 4, dtype: str = "float32", **attributes: object) -> onnx.ModelProto:
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], **attributes)
    constants = [numpy_helper.from_array(np.asarray(scales, np.float32), "scales")]
    dims = [f"d{k}" for k in range(rank)]
    return make_model([node], [value_info("x", dtype, dims)], [value_info("y", dtype, [f"y{k}" for k in range(rank)])],
                      19, constants)  # fmt: skip


FORMS = list(itertools.product(
    ("nearest", "linear", "cubic"), ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"),
))  # fmt: skip


@pytest.mark.parametrize("mode, coordinates", FORMS)
def test_symbolic_sizes(mode: str, coordinates: str) -> None:
    proto = make_resize([1.0, 1.0, 2.0, 0.75], mode=mode, coordinate_transformation_mode=coordinates)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    rng = np.random.default_rng(0)
    for shape in ((1, 2, 3, 8), (2, 1, 5, 4), (1, 3, 1, 12)):
        x = rng.standard_normal(shape).astype(np.float32)
        (want,) = reference.run(None, {"x": x})
        np.testing.assert_allclose(np.asarray(module(x=x)["y"]), want, rtol=1e-5, atol=1e-5)


def test_half_precision_and_bytes() -> None:
    rng = np.random.default_rng(1)
    for dtype in ("float16", "uint8"):
        module = lowering.compile(make_resize([1.0, 2.0], 2, dtype, mode="linear"))
        x = (rng.random((4, 6)) * 200).astype(dtype)
        wide = ReferenceEvaluator(make_resize([1.0, 2.0], 2, mode="linear")).run(None, {"x": x.astype(np.float32)})[0]
        assert np.abs(np.asarray(module(x=x)["y"]).astype(np.float64) - wide).max() <= (1 if dtype == "uint8" else 0.1)


def test_scales_of_the_run() -> None:
    """Symbolic sizes, with scales as inputs; scales that give invalid sizes are an error."""
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    inputs = [value_info("x", "float32", ["a", "b"]), value_info("scales", "float32", [2])]
    proto = make_model([node], inputs, [value_info("y", "float32", ["p", "q"])], 19)
    module, reference = lowering.compile(proto), ReferenceEvaluator(proto)
    x = np.random.default_rng(3).standard_normal((3, 5)).astype(np.float32)
    for scales in ([1.0, 2.0], [0.5, 1.5], [4.0, 0.25]):
        feeds = {"x": x, "scales": np.asarray(scales, np.float32)}
        (want,) = reference.run(None, feeds)
        np.testing.assert_allclose(np.asarray(module.run(feeds)["y"]), want, rtol=1e-5, atol=1e-5)
    for hostile in (0.0, -1.0, np.nan, np.inf, 1e30):
        with pytest.raises(InputError):
            module.run({"x": x, "scales": np.asarray([1.0, hostile], np.float32)})


def make_run_time_resize(
    input: str, axes: list[int], rank: int = 2, sizes: list[int] | None = None, **attributes: object
) -> onnx.ModelProto:
    """Return a Resize of symbolic sizes, by an input at run time, or by constant sizes."""
    names = ["x", "", "scales", ""] if input == "scales" else ["x", "", "", "sizes"]
    node = helper.make_node("Resize", names, ["y"], axes=axes, **attributes)
    inputs = [value_info("x", "float32", [f"d{k}" for k in range(rank)])]
    constants = [numpy_helper.from_array(np.asarray(sizes, np.int64), "sizes")] if sizes else []
    if not sizes:
        inputs.append(value_info(input, "float32" if input == "scales" else "int64", [len(axes)]))
    return make_model([node], inputs, [value_info("y", "float32", [f"y{k}" for k in range(rank)])], 19, constants)


def check_equal(proto: onnx.ModelProto, calls: list[tuple[tuple[int, ...], dict[str, np.ndarray]]]) -> None:
    module, reference, rng = lowering.compile(proto), ReferenceEvaluator(proto), np.random.default_rng(5)
    for shape, feeds in calls:
        feeds = {"x": rng.standard_normal(shape).astype(np.float32), **feeds}
        (expected,) = reference.run(None, feeds)
        actual = np.asarray(module.run(feeds)["y"])
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "attributes",
    [
        {"mode": "linear"},
        {"mode": "cubic"},
        {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        {"mode": "linear", "coordinate_transformation_mode": "asymmetric", "exclude_outside": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("input", ["sizes", "scales", "constant sizes"])
def test_antialias_of_run(input: str, attributes: dict[str, object]) -> None:
    """Shrinking and growing, by factors of the run."""
    shapes = [(3, 17), (2, 5), (1, 40)]
    if input == "constant sizes":
        calls = [(shape, {}) for shape in shapes]
    elif input == "sizes":
        calls = [(s, {input: np.asarray([n])}) for s in shapes for n in (1, 4, 20)]
    else:
        calls = [(s, {input: np.asarray([n], np.float32)}) for s in shapes for n in (0.3, 0.71, 1.5)]
    check_equal(
        make_run_time_resize(input, [1], sizes=[4] if input == "constant sizes" else None, antialias=1, **attributes),
        calls,
    )


def test_antialias_outside_of_a_crop() -> None:
    """Locations outside X have a constant value, also where many elements are weighted."""
    settings = {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    node = helper.make_node("Resize", ["x", "roi", "", "sizes"], ["y"], axes=[0], antialias=1, **settings)
    constants = [numpy_helper.from_array(np.asarray([-0.2, 1.1], np.float32), "roi")]
    inputs = [value_info("x", "float32", ["a"]), value_info("sizes", "int64", [1])]
    proto = make_model([node], inputs, [value_info("y", "float32", ["b"])], 19, constants)
    check_equal(proto, [((n,), {"sizes": np.asarray([m])}) for n, m in ((30, 4), (12, 5), (6, 9))])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
@pytest.mark.parametrize("is_static", [False, True])
def test_aspect_ratio_of_run(mode: str, policy: str, is_static: bool) -> None:
    """Symbolic sizes, by numbers or by an input."""
    sizes = [[7, 8], [4, 30], [20, 3]]
    shapes = [(6, 2, 9), (5, 1, 5), (12, 2, 4)]
    for constant in sizes if is_static and mode == "linear" else sizes[:1]:
        proto = make_run_time_resize(
            "sizes", [2, 0], 3, constant if is_static else None, mode=mode, keep_aspect_ratio_policy=policy
        )
        feeds = [{}] if is_static else [{"sizes": np.asarray(n)} for n in sizes]
        check_equal(proto, list(itertools.product(shapes, feeds)))
    if not is_static:
        module = lowering.compile(proto)
        for shape, hostile in (((6, 2, 9), [0, 3]), ((6, 2, 9), [2, -1]), ((0, 2, 9), [2, 2]), ((6, 1, 9), [2**62, 2])):
            with pytest.raises(InputError):
                module.run({"x": np.zeros(shape, np.float32), "sizes": np.asarray(hostile)})


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_antialias_with_aspect_ratio_of_run(mode: str, policy: str) -> None:
    proto = make_run_time_resize("sizes", [0, 1], mode=mode, keep_aspect_ratio_policy=policy, antialias=1)
    check_equal(proto, [(s, {"sizes": np.asarray(n)}) for s in ((20, 9), (5, 8)) for n in ([3, 4], [8, 30])])


def test_between_convolutions() -> None:
    """Channels are last, as in convolutions."""
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
    proto = make_model(nodes, [value_info("x", "float32", dims)], [value_info("y", "float32", ["n", 8, "p", "q"])], 19,
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
        lowering.compile(make_resize([1.0, 2.0], 2, **attributes))
