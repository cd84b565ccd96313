"""Squeeze without axes on symbolic sizes: the declared rank selects the axes, and a run checks it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import lowering
from tests.support.error_codes import raises


def make_model(declared: str, dims: str = "n, 1, m, 3", opset: int = 12) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float[{dims}] x) => (float[{declared}] y) '
        "{ r = Neg(x) y = Squeeze(r) }"
    )


@pytest.mark.parametrize("opset", [12, 13, 21])
@pytest.mark.parametrize(
    ("dims", "declared", "shape"),
    [
        ("n, 1, m, 3", "n, m, 3", (2, 1, 4, 3)), ("n, 1, m, 3", "n, m, 3", (2, 1, 0, 3)),
        ("n, 1, m, 3", "3", (1, 1, 1, 3)), ("n, 1, 3", "n, 3", (5, 1, 3)), ("n, 2", "2", (1, 2)), ("n", "n", (7,)),
    ],
)  # fmt: skip
def test_the_declared_rank_selects_the_axes(opset: int, dims: str, declared: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(lowering.compile(make_model(declared, dims, opset)).run({"x": x})["y"], -x.squeeze())


@pytest.mark.parametrize(
    ("declared", "shape", "said"),
    [
        (
            "n, m, 3",
            (1, 1, 4, 3),
            "Dimension 0 is 1, and the model is compiled for other sizes. Give the axes, or compile with",
        ),
        ("n, m, 3", (2, 1, 1, 3), "Dimension 2 is 1"),
        ("3", (1, 1, 2, 3), "Dimension 2 is 2, and the model is compiled for 1. Give the axes"),
        ("3", (0, 1, 1, 3), "Dimension 0 is 0"),
    ],
)
def test_runs_of_another_rank(declared: str, shape: tuple[int, ...], said: str) -> None:
    with raises("squeeze.axes_changed"):
        lowering.compile(make_model(declared)).run({"x": np.ones(shape, np.float32)})


def test_ranks_that_are_ambiguous() -> None:
    text = make_model("a, 3")
    with raises("squeeze.axes_ambiguous"):
        lowering.compile(text)
    x = np.ones((1, 1, 5, 3), np.float32)
    assert lowering.compile(text, dims={"n": 1}).run({"x": x})["y"].shape == (5, 3)
