"""Codes that are dequantized, moved and quantized again as they were stay what they are."""

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


def growing(outputs: str, scale: str = "t", more: str = "") -> onnx.ModelProto:
    """A cache that is quantized, grows by what is quantized with it, and is read with its heads repeated."""
    return onnx.parser.parse_model(GROWING.format(outputs=outputs, scale=scale, more=more))


CODES = "int8[B, 6, 8, L] keys, float[B, 2, L, 8] present"


@pytest.mark.parametrize(
    ("proto", "left"),
    [
        (growing(CODES), 3),  # of the past, once more with the other scale, and of what is new
        (growing(CODES, scale="s"), 2),
        (growing(CODES + ", float[B, 2, L, 8] joined"), 2),  # which is read as it is, too
        (growing(CODES + ", int64[4] size", more="size = Shape (joined)"), 3),
        (growing(CODES + ", float[B, 6, L, 8] heads"), 3),
    ],
    ids=["two scales", "one scale", "read elsewhere", "its size is read", "moved floats are read"],
)
def test_what_is_joined_and_repeated_is_bytes(proto: onnx.ModelProto, left: int) -> None:
    """Exactly, ends of the range included."""
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


def test_scales_of_an_axis_are_joined_as_floats() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        axis (float[N, 2] a, float[N, 2] b) => (int8[N, 4] q) <float[4] s = {0.1, 0.2, 0.3, 0.4}> {
          joined = Concat <axis = 1> (a, b)
          q = QuantizeLinear <axis = 1, output_dtype = 3> (joined, s)
        }""")
    assert [node.op_type for node in fuse(load_model(proto)).graph] == ["Concat", "QuantizeLinear"]
    feeds = {name: np.random.default_rng(0).standard_normal((3, 2), np.float32) for name in "ab"}
    (want,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_array_equal(lowering.compile(proto).run(feeds)["q"], want)
