"""Indices that divide what goes down: TVM's simplifier rounds such quotients the other way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import lowering

SIZES = {"N": 11}
MODELS = {
    "tiled, reversed": """
        g (float[10] x) => (float[40] y) <int64[1] count = {4}, int64[1] last = {-1}, int64[1] least = {-1000}> {
            tiled = Tile(x, count)
            y = Slice(tiled, last, least, zero, last)
        }""",
    "tiled, every third in reverse": """
        g (float[N] x) => (float[M] y) <int64[1] count = {4}, int64[1] last = {-1}, int64[1] least = {-1000},
                                        int64[1] step = {-3}> {
            tiled = Tile(x, count)
            y = Slice(tiled, last, least, zero, step)
        }""",
    "rearranged, reversed": """
        g (float[1,8,5,1] x) => (float[1,2,10,2] y) <int64[3] last = {-1, -1, -1},
                                                     int64[3] least = {-99, -99, -99}, int64[3] axes = {1, 2, 3}> {
            space = DepthToSpace<blocksize = 2>(x)
            y = Slice(space, last, least, axes, last)
        }""",
    "reversed, tiled": """
        g (float[N] x) => (float[M] y) <int64[1] count = {4}, int64[1] last = {-1}, int64[1] least = {-1000}> {
            reversed = Slice(x, last, least, zero, last)
            y = Tile(reversed, count)
        }""",
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_evaluator(name: str) -> None:
    text = MODELS[name].replace("> {", ", int64[1] zero = {0}> {", 1) if "zero" in MODELS[name] else MODELS[name]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    shape = [d.dim_value or SIZES[d.dim_param] for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_array_equal(lowering.compile(model)(x=x)["y"], want)
