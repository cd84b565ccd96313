"""DeformConv: the standard's cases with constant weights, groups, masks, symbolic sizes, and offsets far away."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import lowering
from lowering.errors import InputError, NodeError
from tests.cases import node_cases
from tests.ops.expectations import make_model, value_info


def compute_expected(
    x: np.ndarray, w: np.ndarray, offset: np.ndarray, mask: np.ndarray | None, settings: dict[str, Any]
) -> np.ndarray:
    """Compute the result in float64, position by position, over any number of axes."""
    axes, kernel = x.ndim - 2, w.shape[2:]
    strides, dilations = settings.get("strides", [1] * axes), settings.get("dilations", [1] * axes)
    pads, group, groups = settings.get("pads", [0] * axes), settings.get("group", 1), settings.get("offset_group", 1)
    output_sizes = offset.shape[2:]
    elements = int(np.prod(kernel))
    offsets = offset.reshape(len(x), groups, elements, axes, *output_sizes)
    scale = (
        np.ones((len(x), groups, elements, *output_sizes))
        if mask is None
        else mask.reshape(len(x), groups, elements, *output_sizes)
    )
    y = np.zeros((len(x), len(w), *output_sizes))
    for n, m, c, position in itertools.product(
        range(len(x)), range(len(w)), range(w.shape[1]), np.ndindex(*output_sizes)
    ):
        channel = m // (len(w) // group) * w.shape[1] + c
        g = channel // (x.shape[1] // groups)
        for k, element in enumerate(np.ndindex(*kernel)):
            location = [p * s - pad + e * d for p, s, pad, e, d in zip(position, strides, pads, element, dilations)]
            location = np.asarray(location) + offsets[(n, g, k, slice(None), *position)]
            low, value = np.floor(location), 0.0
            for corner in itertools.product((0, 1), repeat=axes):
                index = low + corner
                if all(0 <= i < size for i, size in zip(index, x.shape[2:])):
                    share = np.prod([(a - b) if step else 1 - (a - b) for a, b, step in zip(location, low, corner)])
                    value += share * x[(n, channel, *index.astype(int))]
            y[(n, m, *position)] += value * w[(m, c, *element)] * scale[(n, g, k, *position)]
    return y


def draw_feeds(
    shape: tuple[int, ...], w: tuple[int, ...], masked: bool, settings: dict[str, Any], seed: int = 0
) -> dict[str, np.ndarray]:
    rng, axes = np.random.default_rng(seed), len(shape) - 2
    strides, dilations = settings.get("strides", [1] * axes), settings.get("dilations", [1] * axes)
    pads = settings.get("pads", [0] * 2 * axes)
    output_sizes = [
        (size + pads[a] + pads[axes + a] - dilations[a] * (w[2 + a] - 1) - 1) // strides[a] + 1
        for a, size in enumerate(shape[2:])
    ]
    count = settings.get("offset_group", 1) * int(np.prod(w[2:]))
    feeds = {
        "x": rng.standard_normal(shape), "w": rng.standard_normal(w),
        "offset": rng.standard_normal((shape[0], count * axes, *output_sizes)) * 1.5,
    }  # fmt: skip
    return feeds | ({"mask": rng.random((shape[0], count, *output_sizes))} if masked else {})


def make_model_of(
    feeds: dict[str, np.ndarray], dtype: str, settings: dict[str, Any], symbolic: bool, constant: bool
) -> onnx.ModelProto:
    names = ["x", "w", "offset", "", "mask" if "mask" in feeds else ""]
    node = helper.make_node("DeformConv", names, ["y"], **settings)
    inputs, constants = [], []
    for name, array in feeds.items():
        if name == "w" and constant:
            constants.append(numpy_helper.from_array(array.astype(dtype), name))
            continue
        numbers = 4 if name == "w" else 2
        dims = [d if not symbolic or k in (1,) or numbers == 4 else f"{name}{k}" for k, d in enumerate(array.shape)]
        inputs.append(value_info(name, dtype, dims))
    rank = feeds["x"].ndim
    return make_model([node], inputs, [value_info("y", dtype, [f"y{k}" for k in range(rank)])], 22, constants)


FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, dict[str, Any]]] = {
    "plain": ((1, 3, 6, 5), (2, 3, 3, 2), False, {}),
    "mask": ((2, 2, 5, 5), (3, 2, 2, 2), True, {"pads": [1, 0, 0, 1]}),
    "groups": ((2, 6, 5, 4), (4, 3, 2, 3), True, {"group": 2, "pads": [1, 1, 1, 1]}),
    "offset groups": ((1, 6, 7, 5), (2, 6, 3, 3), False, {"offset_group": 3, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    "both": ((1, 8, 6, 6), (6, 4, 2, 2), True, {"group": 2, "offset_group": 4, "dilations": [2, 1]}),
    "offset groups across groups": ((1, 6, 4, 4), (3, 2, 2, 2), True, {"group": 3, "offset_group": 2}),
    "one axis": ((2, 4, 9), (4, 2, 3), True, {"group": 2, "strides": [2], "pads": [1, 1]}),
    "three axes": ((1, 2, 3, 4, 3), (2, 2, 2, 2, 2), False, {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    """Half of the forms have symbolic sizes and weights as inputs."""
    shape, w, masked, settings = FORMS[form]
    symbolic = list(FORMS).index(form) % 2 == 0
    constant = not symbolic
    feeds = draw_feeds(shape, w, masked, settings)
    module = lowering.compile(make_model_of(feeds, "float32", settings, symbolic, constant))
    if constant:
        feeds = {n: a.astype(np.float32).astype(np.float64) for n, a in feeds.items()}
    want = compute_expected(feeds["x"], feeds["w"], feeds["offset"], feeds.get("mask"), settings)
    inputs = {n: a.astype(np.float32) for n, a in feeds.items() if not (n == "w" and constant)}
    np.testing.assert_allclose(np.asarray(module.run(inputs)["y"]), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype, close", [("float64", 1e-12), ("float16", 5e-2)])
def test_types(dtype: str, close: float) -> None:
    shape, w, masked, settings = FORMS["mask"]
    feeds = {n: a.astype(dtype) for n, a in draw_feeds(shape, w, masked, settings).items()}
    feeds["offset"] = np.round(feeds["offset"] * 8) / 8
    module = lowering.compile(make_model_of(feeds, dtype, settings, False, False))
    wide = {n: a.astype(np.float64) for n, a in feeds.items()}
    want = compute_expected(wide["x"], wide["w"], wide["offset"], wide["mask"], settings)
    np.testing.assert_allclose(np.asarray(module.run(feeds)["y"]).astype(np.float64), want, rtol=close, atol=close)


def test_cases_with_constants() -> None:
    for case in node_cases.cases("DeformConv"):
        node_cases.run(node_cases.with_constants(case))


def test_offsets_that_are_not_finite() -> None:
    """Positions far away read 0, and positions that are not finite read nothing."""
    feeds = {n: a.astype(np.float32) for n, a in draw_feeds((1, 1, 4, 4), (1, 1, 2, 2), False, {}).items()}
    feeds["offset"][:] = np.asarray([np.nan, np.inf, -np.inf, 3e38, -1e30, 1e9, -5, 7], np.float32)[None, :, None, None]
    actual = lowering.compile(make_model_of(feeds, "float32", {}, True, False)).run(feeds)["y"]
    np.testing.assert_array_equal(np.asarray(actual), np.zeros((1, 1, 3, 3), np.float32))


def test_refusals() -> None:
    feeds = draw_feeds((1, 4, 5, 5), (2, 4, 2, 2), True, {})
    for settings, words in (
        ({"offset_group": 3}, "offset_group is 3, for 4 channels"),
        ({"offset_group": 2}, "must be 16"),
        ({"group": 3}, "group"),
        ({"kernel_shape": [3, 3]}, "kernel_shape"),
        ({"offset_group": 0}, "offset_group is 0"),
    ):
        with pytest.raises(NodeError, match=words):
            lowering.compile(make_model_of(feeds, "float32", settings, False, True))
    module = lowering.compile(make_model_of(feeds, "float32", {}, True, True))
    inputs = {n: a.astype(np.float32) for n, a in feeds.items() if n != "w"}
    with pytest.raises(InputError):
        module.run({**inputs, "offset": inputs["offset"][..., :3]})
