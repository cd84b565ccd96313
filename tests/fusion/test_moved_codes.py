"""Values that are dequantized, moved and quantized again with the same scale stay quantized."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import pytest

import lowering
from lowering.fusion import fuse
from lowering.graph.loading.model import load_model

TEXT = """<ir_version: 10, opset_import: ["" : 21]>
    tied (int64[N] ids) => (float[N, 500] y) {
      table = DequantizeLinear (quantized, s, z)
      x = Gather (table, ids)
      across = Transpose <perm = [1, 0]> (table)
      again = QuantizeLinear (across, s2, z2)
      weight = DequantizeLinear (again, s2, z2)
      xq = QuantizeLinear (x, s, z)
      xd = DequantizeLinear (xq, s, z)
      y = MatMul (xd, weight)
    }"""


def make_model(scale: float = 0.013, zero: int = 7, replaced: dict[str, np.ndarray] | None = None) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(0)
    arrays = {"quantized": rng.integers(-128, 128, (500, 64)).astype(np.int8)}
    for name in ("s", "s2"):
        arrays[name] = np.array(scale, np.float32)
    for name in ("z", "z2"):
        arrays[name] = np.array(zero, np.int8)
    arrays |= replaced or {}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


def list_operators(proto: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in fuse(load_model(proto)).graph]


@pytest.mark.parametrize("zero", [0, 7, -128])
@pytest.mark.parametrize("scale", [0.013, 1e-20, 3e7])
def test_quantized_values_are_moved(scale: float, zero: int) -> None:
    proto = make_model(scale, zero)
    assert list_operators(proto).count("QuantizeLinear") == 1 and "MatMulInteger" in list_operators(proto)
    ids = {"ids": np.array([0, 499, 3])}
    (expected,) = onnx.reference.ReferenceEvaluator(proto).run(None, ids)
    module = lowering.compile(proto)
    np.testing.assert_allclose(module.run(ids)["y"], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert not any("transpose" in kernel.name for kernel in module.manifest.kernels)  # the weight is packed


@pytest.mark.parametrize(
    "replaced",
    [
        {"s2": np.array(0.014, np.float32)}, {"z2": np.array(6, np.int8)}, {"s2": np.full(64, 0.013, np.float32),
         "z2": np.full(64, 7, np.int8)}, {"s": np.array(1e-38, np.float32), "s2": np.array(1e-38, np.float32)},
    ],
)  # fmt: skip
def test_other_scales_and_zero_points_are_not(replaced: dict[str, np.ndarray]) -> None:
    proto = make_model(replaced=replaced)
    if replaced["s2" if "s2" in replaced else "z2"].ndim:  # a scale for each column of the transposed table
        for node in proto.graph.node:
            if "s2" in node.input:
                node.attribute.append(onnx.helper.make_attribute("axis", 0))
    assert list_operators(proto).count("QuantizeLinear") == 2
    ids = {"ids": np.array([1, 2])}
    (expected,) = onnx.reference.ReferenceEvaluator(proto).run(None, ids)
    actual = lowering.compile(proto).run(ids)["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * (np.abs(expected).max() + 1e-30))


GROWING = """<ir_version: 10, opset_import: ["" : 21]>
    growing (float[B, 2, P, 8] past, float[B, 2, T, 8] new) => ({outputs})
        <float s = {{0.02}}, float t = {{0.03}}, int8 z = {{-3}},
        int64[1] two = {{2}}, int64[5] three = {{1, 1, 3, 1, 1}}, int64[4] own = {{0, 6, -1, 8}}> {{
      pq = QuantizeLinear (past, s, z)
      pd = DequantizeLinear (pq, s, z)
      joined = Concat <axis = 2> (pd, new)
      jq = QuantizeLinear (joined, {scale}, z)
      present = DequantizeLinear (jq, {scale}, z)
      wide = Unsqueeze (present, two)
      repeated = Expand (wide, three)
      heads = Reshape (repeated, own)
      turned = Transpose <perm = [0, 1, 3, 2]> (heads)
      keys = QuantizeLinear (turned, {scale}, z)
      {more}
    }}"""


def make_growing_cache(outputs: str, scale: str = "t", more: str = "") -> onnx.ModelProto:
    """Return a quantized cache that grows by quantized values and is read with its heads repeated."""
    return onnx.parser.parse_model(GROWING.format(outputs=outputs, scale=scale, more=more))


QUANTIZED = "int8[B, 6, 8, L] keys, float[B, 2, L, 8] present"


@pytest.mark.parametrize(
    ("proto", "left"),
    [
        (make_growing_cache(QUANTIZED), 3),  # the past, the past again with the other scale, and the new tokens
        (make_growing_cache(QUANTIZED, scale="s"), 2),
        (make_growing_cache(QUANTIZED + ", float[B, 2, L, 8] joined"), 2),  # the concatenated floats are read, too
        (make_growing_cache(QUANTIZED + ", int64[4] size", more="size = Shape (joined)"), 3),
        (make_growing_cache(QUANTIZED + ", float[B, 6, L, 8] heads"), 3),
    ],
    ids=["two scales", "one scale", "read elsewhere", "its size is read", "moved floats are read"],
)
def test_concatenated_and_repeated_caches_are_bytes(proto: onnx.ModelProto, left: int) -> None:
    """Results are exact, ends of the range included."""
    fused = fuse(load_model(proto)).graph
    assert sum(node.op_type == "QuantizeLinear" for node in fused) == left
    rng, module = np.random.default_rng(3), lowering.compile(proto)
    for batch, past, new in ((1, 5, 1), (2, 1, 4), (1, 0, 3), (2, 33, 1)):
        feeds = {
            name: (rng.standard_normal((batch, 2, length, 8)) * 2).astype(np.float32)
            for name, length in (("past", past), ("new", new))
        }
        want = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
        for name, expected in zip((output.name for output in proto.graph.output), want):
            np.testing.assert_array_equal(module.run(feeds)[name], expected, err_msg=name)


def test_caches_with_scales_along_an_axis_are_concatenated_as_floats() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        axis (float[N, 2] a, float[N, 2] b) => (int8[N, 4] q) <float[4] s = {0.1, 0.2, 0.3, 0.4}> {
          joined = Concat <axis = 1> (a, b)
          q = QuantizeLinear <axis = 1, output_dtype = 3> (joined, s)
        }""")
    assert [node.op_type for node in fuse(load_model(proto)).graph] == ["Concat", "QuantizeLinear"]
    feeds = {name: np.random.default_rng(0).standard_normal((3, 2), np.float32) for name in "ab"}
    (want,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_array_equal(lowering.compile(proto).run(feeds)["q"], want)
