"""Codes that are dequantised, transposed and quantised again as they were stay what they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest

import lowering
from lowering.fusion import fuse
from lowering.graph.model import load_model

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
    tied (int64[N] ids) => (float[N, 500] y) {
      table = DequantizeLinear (codes, s, z)
      x = Gather (table, ids)
      across = Transpose <perm = [1, 0]> (table)
      again = QuantizeLinear (across, s2, z2)
      weight = DequantizeLinear (again, s2, z2)
      xq = QuantizeLinear (x, s, z)
      xd = DequantizeLinear (xq, s, z)
      y = MatMul (xd, weight)
    }"""


def model(scale: float = 0.013, zero: int = 7, other: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    made = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    arrays = {"codes": rng.integers(-128, 128, (500, 64)).astype(np.int8)}
    for name in ("s", "s2"):
        arrays[name] = np.array(scale, np.float32)
    for name in ("z", "z2"):
        arrays[name] = np.array(zero, np.int8)
    arrays |= other or {}
    made.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return made


def kinds(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in fuse(load_model(proto)).graph]


@pytest.mark.parametrize("zero", [0, 7, -128])
@pytest.mark.parametrize("scale", [0.013, 1e-20, 3e7])
def test_they_are_moved(scale: float, zero: int) -> None:
    proto = model(scale, zero)
    assert kinds(proto).count("QuantizeLinear") == 1 and "MatMulInteger" in kinds(proto)
    ids = {"ids": np.array([0, 499, 3])}
    (want,) = onnx.reference.ReferenceEvaluator(proto).run(None, ids)
    module = lowering.compile(proto)
    np.testing.assert_allclose(module.run(ids)["y"], want, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    assert not any("transpose" in kernel.name for kernel in module.manifest.kernels)  # the weight is packed


@pytest.mark.parametrize(
    "other",
    [
        {"s2": np.array(0.014, np.float32)}, {"z2": np.array(6, np.int8)}, {"s2": np.full(64, 0.013, np.float32),
         "z2": np.full(64, 7, np.int8)}, {"s": np.array(1e-38, np.float32), "s2": np.array(1e-38, np.float32)},
    ],
)  # fmt: skip
def test_what_is_another_number_is_not(other: dict[str, np.ndarray]) -> None:
    proto = model(other=other)
    if other["s2" if "s2" in other else "z2"].ndim:  # a scale for each column of what was turned
        for node in proto.graph.node:
            if "s2" in node.input:
                node.attribute.append(onnx.helper.make_attribute("axis", 0))
    assert kinds(proto).count("QuantizeLinear") == 2
    ids = {"ids": np.array([1, 2])}
    (want,) = onnx.reference.ReferenceEvaluator(proto).run(None, ids)
    found = lowering.compile(proto).run(ids)["y"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * (np.abs(want).max() + 1e-30))
