"""Fused kernels with symbols of which no tensor's shape tells them."""

from __future__ import annotations

import numpy as np
import onnx

import lowering

# Positions after a past: their number is the size of the result, and their start is the size of no tensor.
POSITIONS = """<ir_version: 10, opset_import: ["" : 21]> m (float[P] past, float[S] x) => (float[S] y) {
    zero = Constant <value_int = 0> () one = Constant <value_int = 1> ()
    p = Shape (past) s = Shape (x) first = Squeeze (p) count = Squeeze (s)
    end = Add (first, count) positions = Range (first, end, one)
    f = Cast <to = 1> (positions) y = Exp (f) }"""


def test_positions_after_a_past() -> None:
    module = lowering.compile(onnx.parser.parse_model(POSITIONS))
    for past, count in ((3, 4), (0, 2), (5, 0)):
        actual = module.run({"past": np.zeros(past, np.float32), "x": np.zeros(count, np.float32)})["y"]
        np.testing.assert_allclose(actual, np.exp(np.arange(past, past + count, dtype=np.float32)), rtol=1e-6)
    (kernel,) = (call.name for call in module.manifest.kernels)
    assert "range" in kernel and "exp" in kernel  # they are one kernel, which is why it needs both symbols
