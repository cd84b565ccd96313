"""DynamicQuantizeLSTM, compared with its rounding in NumPy and with onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

import lowering
from lowering.checking.references import create_session_options
from tests.ops.expectations import make_model, value_info
from tests.support.this_machine import TARGETS

_UNITS, _WIDTH = 21, 10


def _quantize_dequantize(x: np.ndarray) -> np.ndarray:
    """Return x after quantization to bytes, whose range includes 0."""
    low, high = min(x.min(initial=0), np.float32(0)), max(x.max(initial=0), np.float32(0))
    scale = np.float32((high - low) / np.float32(255)) if high > low else np.float32(1)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    return scale * (np.clip(np.rint(x / scale) + zero, 0, 255) - zero).astype(np.float64)


def _run_lstm(x: np.ndarray, w: np.ndarray, r: np.ndarray, b: np.ndarray, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Return Y [L, directions, B, H]. w and r are dequantized, [directions, inputs, 4 H]; inputs has lens, h, c."""
    (length, batch, _), directions, units = x.shape, w.shape[0], r.shape[1]
    lens = inputs.get("lens", np.full(batch, length))
    y = np.zeros((length, directions, batch, units))
    for d in range(directions):
        gates = _quantize_dequantize(x) @ w[d] + (b[d, : 4 * units] + b[d, 4 * units :])
        for n in range(batch):
            h, c = (inputs[k][d, n].astype(np.float64) if k in inputs else np.zeros(units) for k in "hc")
            for step in range(lens[n]):
                t = lens[n] - 1 - step if d else step
                preactivations = gates[t, n] + _quantize_dequantize(h.astype(np.float32)) @ r[d]
                i, o, f, g = preactivations.reshape(4, units)
                i, o, f = (1 / (1 + np.exp(-gate)) for gate in (i, o, f))
                c = f * c + i * np.tanh(g)
                h = y[t, d, n] = o * np.tanh(c)
    return y


def _check_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Check equality, except for single bytes of states that float32 rounds in the other direction."""
    error = np.abs(actual - expected)
    assert np.median(error) < 1e-5 and error.max() < 4e-3, (np.median(error), error.max())


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "dtype, by_column, batch, extra",
    [
        ("int8", False, 1, ()),
        ("int8", True, 3, ("lens",)),
        ("uint8", False, 2, ("h", "c")),
        ("uint8", True, 5, ()),
        ("int8", True, 1, ("lens", "h", "c")),
    ],
)
@pytest.mark.parametrize("directions", [1, 2])
def test_rounds_inputs_and_states(
    dtype: str, by_column: bool, batch: int, extra: tuple[str, ...], directions: int
) -> None:
    """With and without -128 among the weights: without it AVX2 multiplies in fewer instructions."""
    rng = np.random.default_rng(batch + directions)
    shape = directions, 4 * _UNITS
    feeds = {"x": rng.standard_normal((7, batch, _WIDTH)).astype(np.float32)}
    feeds |= {n: rng.standard_normal((directions, batch, _UNITS)).astype(np.float32) for n in "hc" if n in extra}
    feeds |= {"lens": rng.integers(0, 8, batch).astype(np.int32)} if "lens" in extra else {}
    bounds = np.iinfo(dtype)
    weights: dict[str, np.ndarray] = {"b": (rng.standard_normal((directions, 8 * _UNITS)) * 0.3).astype(np.float32)}
    dequantized = {}
    for name, inputs in (("w", _WIDTH), ("r", _UNITS)):
        quantized = rng.integers(bounds.min + batch % 2, bounds.max + 1, (directions, inputs, 4 * _UNITS)).astype(dtype)
        scale_shape = shape if by_column else shape[:1]
        scale = rng.uniform(0.001, 0.004, scale_shape).astype(np.float32)
        zero = rng.integers(bounds.min, bounds.max + 1, scale_shape).astype(dtype) // 4
        weights |= {name: quantized, f"{name}_scale": scale, f"{name}_zero": zero}
        scale, zero = (np.broadcast_to(n.reshape(directions, -1), shape)[:, None] for n in (scale, zero))
        dequantized[name] = (quantized.astype(np.float64) - zero) * scale
    order = ["x", "w", "r", "b", "lens", "h", "c", "p", "w_scale", "w_zero", "r_scale", "r_zero"]
    node = helper.make_node(
        "DynamicQuantizeLSTM", [n if n in {**feeds, **weights} else "" for n in order], ["y"], domain="com.microsoft",
        hidden_size=_UNITS, direction="forward" if directions == 1 else "bidirectional",
    )  # fmt: skip
    inputs = [value_info(n, str(a.dtype), list(a.shape)) for n, a in feeds.items()]
    proto = make_model([node], inputs, [value_info("y", "float32", ["l", "d", "b", "u"])], 21,
                       [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    expected = _run_lstm(feeds["x"], dequantized["w"], dequantized["r"], weights["b"], feeds)
    for target in TARGETS:
        _check_close(np.asarray(lowering.compile(proto, target)(**feeds)["y"]), expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("by_column", [False, True])
def test_against_onnxruntime(tmp_path: Path, batch: int, by_column: bool) -> None:
    """The model of onnxruntime's tool, with weights that byte matmuls do not saturate on any machine."""
    rng = np.random.default_rng(3)
    arrays = {"w": (2, 4 * 24, 10), "r": (2, 4 * 24, 24), "b": (2, 8 * 24)}
    weights = {n: (rng.standard_normal(s) * 0.3).astype(np.float32) for n, s in arrays.items()}
    node = helper.make_node("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=24, direction="bidirectional")
    proto = make_model([node], [value_info("x", "float32", ["L", "B", 10])],
                       [value_info("y", "float32", ["L", 2, "B", 24])], 17,
                       [numpy_helper.from_array(a, n) for n, a in weights.items()])  # fmt: skip
    paths = tmp_path / "float.onnx", tmp_path / "bytes.onnx"
    onnx.save(proto, paths[0])
    options: dict[str, Any] = {"weight_type": QuantType.QInt8, "per_channel": by_column, "reduce_range": True}
    quantize_dynamic(*paths, **options)
    assert {n.op_type for n in onnx.load(paths[1]).graph.node} == {"DynamicQuantizeLSTM"}
    x = rng.standard_normal((9, batch, 10)).astype(np.float32)
    actual = np.asarray(lowering.compile(paths[1])(x=x)["y"])
    expected = onnxruntime.InferenceSession(paths[1], create_session_options()).run(None, {"x": x})[0]
    assert np.abs(actual - expected).max() < (1e-4 if batch == 1 else 1e-2) * np.ptp(expected)
