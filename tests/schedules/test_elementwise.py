"""Element-wise functions at lengths near the ends of tasks."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import lowering

MODEL = """<ir_version: 10, opset_import: ["" : 23]>
lengths (float[N, 1, M] x, float[1, 2, M] z) => (float[N, 2, M] y) {
  s = Add (x, z)
  y = Tanh (s)
}"""


@pytest.fixture(scope="module")
def module() -> lowering.Model:
    return lowering.compile(onnx.parser.parse_model(MODEL))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 8191, 8192, 8193, 3 * 8192 + 5])
def test_ends_of_tasks(module: lowering.Model, length: int, threads: int) -> None:
    """Tasks are whole rows where rows are short, and slices of rows where they are long."""
    rng = np.random.default_rng(length)
    for batch in (0, 1, 3):
        x, z = (rng.standard_normal(shape, np.float32) for shape in ((batch, 1, length), (1, 2, length)))
        result = module.run({"x": x, "z": z}, threads=threads)["y"]
        np.testing.assert_allclose(result, np.tanh(x.astype(float) + z), rtol=1e-5, atol=1e-6)
