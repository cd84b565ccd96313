"""precision="float32": float models compute in floats the matmuls that quantize their activations at run time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantType, quantize_dynamic

import lowering
from tests.ops.expectations import make_model, value_info


def _quantize_model(folder: Path, proto: onnx.ModelProto, by_column: bool, kind: QuantType) -> onnx.ModelProto:
    onnx.save(proto, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "bytes.onnx", weight_type=kind, per_channel=by_column)
    return onnx.load(folder / "bytes.onnx")


def _make_initializers(rng: np.random.Generator, **shapes: tuple[int, ...]) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array((rng.standard_normal(s) * 0.3).astype(np.float32), n) for n, s in shapes.items()]


def _lstm(rng: np.random.Generator, direction: str) -> onnx.ModelProto:
    count = 2 if direction == "bidirectional" else 1
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=12, direction=direction)
    weights = _make_initializers(rng, w=(count, 48, 10), r=(count, 48, 12), b=(count, 96))
    return make_model([node], [value_info("x", "float32", ["L", 2, 10])],
                      [value_info("y", "float32", ["L", count, 2, 12])], 17, weights)  # fmt: skip


def _make_matmuls(rng: np.random.Generator) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Relu", ["h"], ["g"]),
        helper.make_node("MatMul", ["g", "b"], ["y"]),
    ]
    return make_model(nodes, [value_info("x", "float32", ["L", 2, 10])], [value_info("y", "float32", ["L", 2, 6])], 17,
                      _make_initializers(rng, a=(10, 24), b=(24, 6)))  # fmt: skip


def _make_convolution(rng: np.random.Generator) -> onnx.ModelProto:
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1, 1])]
    return make_model(nodes, [value_info("x", "float32", ["L", 2, 10])], [value_info("y", "float32", ["L", 5, 10])], 17,
                      _make_initializers(rng, w=(5, 2, 3), b=(5,)))  # fmt: skip


_MODELS = {
    "LSTM": lambda rng: _lstm(rng, "forward"),
    "LSTM of two directions": lambda rng: _lstm(rng, "bidirectional"),
    "MatMul": _make_matmuls,
    "Conv": _make_convolution,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8], ids=["int8", "uint8"])
@pytest.mark.parametrize("by_column", [False, True], ids=["by tensor", "by column"])
@pytest.mark.parametrize("name", _MODELS)
def test_activations_are_not_rounded(name: str, by_column: bool, kind: QuantType, tmp_path: Path) -> None:
    """The result is that of the dequantized weights, to float32's rounding; the quantized model itself rounds more."""
    if name == "Conv" and by_column:
        kind = QuantType.QUInt8  # onnxruntime does not run the other models of its own tool
    rng = np.random.default_rng(5)
    proto = _MODELS[name](rng)
    quantized = _quantize_model(tmp_path, proto, by_column, kind)
    assert {"DynamicQuantizeLSTM", "DynamicQuantizeLinear"} & {node.op_type for node in quantized.graph.node}
    x = rng.standard_normal((9, 2, 10)).astype(np.float32)
    floats = onnx.ModelProto()
    floats.CopyFrom(proto)
    _store_dequantized(floats, quantized)
    (expected,) = ReferenceEvaluator(floats).run(None, {"x": x})
    scale = np.abs(expected).max()
    module = lowering.compile(quantized, precision="float32")
    assert "compute in float32 what the model quantizes" in " ".join(module.manifest.notes)
    assert np.abs(np.asarray(module(x=x)["y"]) - expected).max() < 1e-5 * scale
    assert np.abs(np.asarray(lowering.compile(quantized)(x=x)["y"]) - expected).max() > 1e-4 * scale


def _store_dequantized(floats: onnx.ModelProto, quantized: onnx.ModelProto) -> None:
    """Replace the weights of the float model by the dequantized weights of the quantized model."""
    arrays = {i.name: numpy_helper.to_array(i) for i in quantized.graph.initializer}
    for initializer in floats.graph.initializer:
        quantized_array = next((arrays[n] for n in (f"{initializer.name}_quantized",) if n in arrays), None)
        if quantized_array is None:
            continue
        scale, zero = arrays[f"{initializer.name}_scale"], arrays[f"{initializer.name}_zero_point"]
        shape = numpy_helper.to_array(initializer).shape
        if (
            quantized_array.ndim == 3 and initializer.name in ("w", "r") and quantized_array.shape != shape
        ):  # [directions, inputs, 4 H]
            parameters = scale.reshape(shape[0], 1, -1), zero.reshape(shape[0], 1, -1)
        elif quantized_array.ndim == 3:
            parameters = scale.reshape(-1, 1, 1), zero.reshape(-1, 1, 1)
        else:
            parameters = scale, zero
        dequantized = (quantized_array.astype(np.float32) - parameters[1].astype(np.float32)) * parameters[0]
        dequantized = dequantized if dequantized.shape == shape else dequantized.transpose(0, 2, 1)
        initializer.CopyFrom(numpy_helper.from_array(dequantized.astype(np.float32), initializer.name))


@pytest.mark.parametrize("constant", [True, False], ids=["constants", "inputs"])
def test_dynamic_quantize_matmul(constant: bool) -> None:
    """DynamicQuantizeMatMul of com.microsoft, with a bias, and weights that may be inputs."""
    rng = np.random.default_rng(7)
    weight_arrays = {
        "b": rng.integers(-128, 128, (10, 6)).astype(np.int8),
        "scale": rng.uniform(0.01, 0.02, 6).astype(np.float32),
        "zero": rng.integers(-9, 9, 6).astype(np.int8),
        "bias": rng.standard_normal(6).astype(np.float32),
    }
    node = helper.make_node("DynamicQuantizeMatMul", ["x", *weight_arrays], ["y"], domain="com.microsoft")
    inputs = [value_info("x", "float32", ["L", 10])]
    inputs += [] if constant else [value_info(n, str(a.dtype), list(a.shape)) for n, a in weight_arrays.items()]
    weights = [numpy_helper.from_array(a, n) for n, a in weight_arrays.items()] if constant else []
    proto = make_model([node], inputs, [value_info("y", "float32", ["L", 6])], 21, weights)
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    x = rng.standard_normal((7, 10)).astype(np.float32)
    wide = {name: array.astype(np.float64) for name, array in weight_arrays.items()}
    expected = x @ ((wide["b"] - wide["zero"]) * wide["scale"]) + wide["bias"]
    answer = lowering.compile(proto, precision="float32")(x=x, **({} if constant else weight_arrays))["y"]
    np.testing.assert_allclose(np.asarray(answer), expected, rtol=1e-4, atol=1e-5)


def test_quantized_values_with_other_readers_stay_quantized() -> None:
    """An output of the model counts as a reader: the model exists to quantize."""
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])
    matmul = helper.make_node("MatMulInteger", ["q", "w", "z"], ["m"])
    outputs = [value_info("q", "uint8", ["L", 4]), value_info("m", "int32", ["L", 3])]
    weights = [numpy_helper.from_array(np.arange(12, dtype=np.int8).reshape(4, 3), "w")]
    proto = make_model([node, matmul], [value_info("x", "float32", ["L", 4])], outputs, 21, weights)
    x = np.random.default_rng(8).standard_normal((5, 4)).astype(np.float32)
    module, expected = lowering.compile(proto, precision="float32"), ReferenceEvaluator(proto).run(None, {"x": x})
    for name, values in zip("qm", expected):
        np.testing.assert_array_equal(np.asarray(module(x=x)[name]), values)


@pytest.mark.parametrize("reader", ["y = Cast <to = 7> (acc)", "f = Cast <to = 1> (acc)  y = Add (f, s)"])
def test_accumulators_that_stay_integers_and_scales_that_are_added_stay(reader: str) -> None:
    kind = "int64" if "to = 7" in reader else "float"
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[L,4] x) => ({kind}[L,3] y) {{
      q, s, z = DynamicQuantizeLinear (x)  acc = MatMulInteger (q, w, z)  {reader} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.arange(12, dtype=np.int8).reshape(4, 3), "w"))
    x = np.random.default_rng(9).standard_normal((5, 4)).astype(np.float32)
    (expected,) = ReferenceEvaluator(proto).run(None, {"x": x})
    answer = np.asarray(lowering.compile(proto, precision="float32")(x=x)["y"])
    np.testing.assert_allclose(answer, expected, rtol=1e-6, strict=True)
