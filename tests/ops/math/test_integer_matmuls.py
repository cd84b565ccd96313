"""Matmuls and convolutions of bytes: exact on every machine, for any zero points; whole models quantized by
onnxruntime."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

import lowering
from lowering.checking.references import create_session_options
from tests.ops.expectations import make_model, value_info
from tests.support.error_codes import raises
from tests.support.placed_arrays import guarded, unaligned
from tests.support.this_machine import TARGETS

SAMPLES = Path(__file__).parents[2] / "exports" / "samples"
# Rows, depth and columns: incomplete packed lanes, one row and many, columns after a panel.
SIZES = [(1, 64, 64), (5, 63, 50), (7, 130, 33), (150, 257, 129), (2, 1, 4), (3, 2, 70), (13, 1030, 5), (6, 31, 3)]


def draw_integers(rng: np.random.Generator, dtype: str, shape: Any) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def make_node_model(
    name: str, arrays: dict[str, np.ndarray | None], constant_names: set[str], rows: str | None
) -> onnx.ModelProto:
    """Return a model of one node with constants `constant_names`. The first axis of A is `rows`, if that is a name."""
    names = [n if x is not None else "" for n, x in arrays.items()]
    while not names[-1]:
        names.pop()
    present_arrays = {n: x for n, x in arrays.items() if x is not None}
    inputs = [
        value_info(n, x.dtype.name, [rows, *x.shape[1:]] if rows and n == "a" else x.shape)
        for n, x in present_arrays.items()
        if n not in constant_names
    ]
    constants = [numpy_helper.from_array(x, n) for n, x in present_arrays.items() if n in constant_names]
    dims = ["y0", "y1"]
    return make_model([helper.make_node(name, names, ["y"])], inputs, [value_info("y", "int32", dims)], 21, constants)


def compute_exact(arrays: dict[str, np.ndarray | None]) -> np.ndarray:
    a, b, a_zero, b_zero = (None if x is None else x.astype(np.int64) for x in arrays.values())
    assert a is not None and b is not None
    a_zero = a_zero[:, None] if a_zero is not None and a_zero.ndim else a_zero
    matmul = (a - (0 if a_zero is None else a_zero)) @ (b - (0 if b_zero is None else b_zero))
    return np.asarray(matmul.astype(np.int32))


def draw_case(rng: random.Random, data: np.random.Generator) -> tuple[dict[str, np.ndarray | None], set[str]]:
    m, k, n = rng.choice(SIZES)
    of_a, of_b = (rng.choice(["uint8", "int8"]) for _ in range(2))
    zero_a, zero_b = rng.choice([None, (), (m,)]), rng.choice([None, (), (n,)])
    arrays = {
        "a": draw_integers(data, of_a, (m, k)),
        "b": draw_integers(data, of_b, (k, n)),
        "a_zero": None if zero_a is None else draw_integers(data, of_a, zero_a),
        "b_zero": None if zero_b is None else draw_integers(data, of_b, zero_b),
    }
    constant_names = {"b"} if rng.random() < 0.8 else set()
    return arrays, constant_names | ({"b_zero"} if rng.random() < 0.8 else set()) | (
        {"a_zero"} if rng.random() < 0.2 else set()
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(24))
def test_matmuls_are_exact(seed: int) -> None:
    rng, data = random.Random(seed), np.random.default_rng(seed)
    arrays, constant_names = draw_case(rng, data)
    symbolic = rng.random() < 0.5 and (arrays["a_zero"] is None or arrays["a_zero"].ndim == 0)
    module = lowering.compile(
        make_node_model("MatMulInteger", arrays, constant_names, "rows" if symbolic else None),
        TARGETS[seed % len(TARGETS)],
    )
    for allocate in (lambda x: guarded(x, True), lambda x: guarded(x, False), unaligned):
        feed = {n: allocate(x) for n, x in arrays.items() if x is not None and n not in constant_names}
        np.testing.assert_array_equal(module.run(feed)["y"], compute_exact(arrays))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_sizes_that_the_run_decides(batch: tuple[int, ...], target: str) -> None:
    """Incomplete packed lanes of a symbolic depth contain all elements, and read nothing after them."""
    dims = [f"b{n}" for n in range(len(batch))]
    inputs = [value_info("a", "uint8", [*dims, "m", "k"]), value_info("b", "int8", [*dims, "k", "n"])]
    outputs = [value_info("y", "int32", [*dims, "m", "n"])]
    module = lowering.compile(
        make_model([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], inputs, outputs, 21), target
    )
    data = np.random.default_rng(0)
    for k, (m, n) in enumerate([(3, 40), (70, 5), (1, 66), (30, 65), (9, 9), (2, 2), (65, 64), (5, 130)]):
        a, b = draw_integers(data, "uint8", (*batch, m, k)), draw_integers(data, "int8", (*batch, k, n))
        for allocate in (lambda x: guarded(x, True), lambda x: guarded(x, False), unaligned):
            y = module.run({"a": allocate(a), "b": allocate(b)})["y"]
            np.testing.assert_array_equal(y, a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("low", [-128, 127])
def test_accumulators_are_neither_saturated_nor_rounded(target: str, low: int) -> None:
    """Pairs of matmuls exceed 16 bits; accumulators of 70,000 terms exceed 32, and wrap modulo 2^32."""
    arrays: dict[str, np.ndarray | None] = {
        "a": np.full((2, 70_000), 255, np.uint8),
        "b": np.full((70_000, 5), low, np.int8),
        "a_zero": None,
        "b_zero": None,
    }
    module = lowering.compile(make_node_model("MatMulInteger", arrays, {"b"}, None), target)
    np.testing.assert_array_equal(module.run({"a": arrays["a"]})["y"], compute_exact(arrays))


@pytest.mark.parametrize("depth", [8, 15, 16, 40])
def test_bytes_that_the_model_widens_itself(depth: int) -> None:
    """LLVM makes byte matmuls of such loops where the machine has instructions; those of version 22 are wrong."""
    nodes = [helper.make_node("Cast", [name], [f"{name}_wide"], to=onnx.TensorProto.INT32) for name in "ab"]
    nodes.append(helper.make_node("MatMul", ["a_wide", "b_wide"], ["y"]))
    inputs = [value_info("a", "uint8", (3, depth)), value_info("b", "int8", (depth,))]
    module = lowering.compile(make_model(nodes, inputs, [value_info("y", "int32", (3,))], 21))
    data = np.random.default_rng(depth)
    a, b = draw_integers(data, "uint8", (3, depth)), draw_integers(data, "int8", depth)
    np.testing.assert_array_equal(module.run({"a": a, "b": b})["y"], a.astype(np.int32) @ b.astype(np.int32))


def test_one_or_two_threads() -> None:
    data = np.random.default_rng(0)
    arrays = {
        "a": draw_integers(data, "uint8", (300, 128)),
        "b": draw_integers(data, "int8", (128, 200)),
        "z": None,
        "y": None,
    }
    module = lowering.compile(make_node_model("MatMulInteger", arrays, {"b"}, "rows"))
    for threads in (1, 2):
        np.testing.assert_array_equal(module.run({"a": arrays["a"]}, threads=threads)["y"], compute_exact(arrays))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_convolutions_are_those_of_onnxruntime(seed: int) -> None:
    """Strides, dilations, pads, groups; the padding has the value of the zero point."""
    rng, data = random.Random(seed), np.random.default_rng(seed)
    group, of_group = rng.choice([(1, 3), (1, 8), (2, 4), (4, 1)])
    kernel, outputs = rng.choice([1, 2, 3]), group * rng.choice([1, 4, 9])
    x = draw_integers(data, "uint8", (2, group * of_group, 9, 11))
    w = draw_integers(data, rng.choice(["uint8", "int8"]), (outputs, of_group, kernel, kernel))
    zeros = {"xz": draw_integers(data, "uint8", ()), "wz": draw_integers(data, w.dtype.name, ())}
    attributes: dict[str, Any] = {"group": group, "strides": [rng.choice([1, 2])] * 2}
    attributes["pads"] = [rng.choice([0, 1]) for _ in range(4)]
    node = helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], **attributes)
    inputs = [value_info("x", "uint8", ["n", *x.shape[1:]]), value_info("xz", "uint8", ())]
    constants = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(zeros["wz"], "wz")]
    proto = make_model([node], inputs, [value_info("y", "int32", ["n", "c", "h", "v"])], 21, constants)
    feed = {"x": x, "xz": zeros["xz"]}
    wide = [(v.astype(np.float64) - zeros[z].astype(np.float64)) for v, z in ((x, "xz"), (w, "wz"))]
    convolution = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    shapes = [value_info(n, "float64", v.shape) for n, v in zip("xw", wide)]
    reference = make_model([convolution], shapes, [value_info("y", "float64", ["n", "c", "h", "v"])], 21)
    expected = lowering.compile(reference).run(dict(zip("xw", wide)))["y"]
    np.testing.assert_array_equal(lowering.compile(proto, TARGETS[seed % len(TARGETS)]).run(feed)["y"], expected)


def test_dynamic_quantization_of_zeros() -> None:
    """Zeros have quantized values 0."""
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    outputs = [value_info("y", "uint8", ["n"]), value_info("s", "float32", ()), value_info("z", "uint8", ())]
    module = lowering.compile(make_model([node], [value_info("x", "float32", ["n"])], outputs, 21))
    results = module.run({"x": np.zeros(7, np.float32)})
    assert not results["y"].any() and results["z"] == 0 and results["s"] == np.float32(1) / 255


def test_other_types_are_refused() -> None:
    arrays = {"a": np.zeros((2, 3), np.int32), "b": np.zeros((3, 2), np.int8), "a_zero": None, "b_zero": None}
    proto = make_node_model("MatMulInteger", arrays, set(), None)
    with raises("node.dtype_unsupported"):
        lowering.compile(proto)


FORMS = [
    ("dynamic, U8S8", {"weight_type": QuantType.QInt8}),
    ("dynamic, U8U8", {"weight_type": QuantType.QUInt8}),
    ("dynamic, by column", {"weight_type": QuantType.QInt8, "per_channel": True}),
    ("QDQ", {"quant_format": QuantFormat.QDQ}),
    ("QDQ, by column", {"quant_format": QuantFormat.QDQ, "per_channel": True}),
    ("QDQ, S8S8", {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QInt8}),
    ("QLinear", {"quant_format": QuantFormat.QOperator}),
]


class Calls:
    """An iterator over the inputs of calibration."""

    def __init__(self, calls: list[dict[str, np.ndarray]]) -> None:
        self.calls = iter(calls)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.calls, None)


EXPORTS = [("distilbert-traced17", "dynamic, U8S8"), ("distilbert-traced17", "QDQ, by column")]
EXPORTS += [("mistral-past-dynamo18", form) for form, _ in FORMS]
QUICK = EXPORTS[:2]
RUNS = [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in EXPORTS]


@pytest.mark.parametrize(("name", "form"), RUNS)
def test_quantized_exports_are_as_near_as_onnxruntime(name: str, form: str, tmp_path: Path) -> None:
    """Models of quantize_dynamic and quantize_static have errors from float64 like those of onnxruntime. Results differ
    by a quantization step at most."""
    options = dict(FORMS)[form]
    path, source = tmp_path / "quantized.onnx", SAMPLES / name / "model.onnx"
    calls = [dict(np.load(call)) for call in sorted((SAMPLES / name).glob("*.npz"))]
    feeds = [{n: x for n, x in arrays.items() if not n.startswith("=")} for arrays in calls]
    if "quant_format" in options:
        quantize_static(source, path, Calls(feeds), **options)
    else:
        quantize_dynamic(source, path, **options)
    module = lowering.compile(path)
    session_options = create_session_options()
    if name.startswith("mistral") and "quant_format" in options:
        # onnxruntime 1.32 refuses these models at its extended level: it adds an initializer twice.
        session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(str(path), session_options)
    names = [output.name for output in session.get_outputs()]
    assert any(kernel.schedule == "matmul" for kernel in module.manifest.kernels)
    for arrays, feed in zip(calls, feeds):
        actual, onnxruntime_results = module.run(feed), dict(zip(names, session.run(names, feed)))
        for output in names:
            reference = arrays[f"={output}"]
            size = float(np.ptp(reference))
            errors = [
                float(np.abs(results[output] - reference).max()) / size for results in (actual, onnxruntime_results)
            ]
            distance = float(np.abs(actual[output] - onnxruntime_results[output]).max()) / size
            assert errors[0] <= 1.3 * errors[1] + 2e-3 and distance <= max(1.2 * errors[1], 4e-3), (
                output,
                errors,
                distance,
            )
