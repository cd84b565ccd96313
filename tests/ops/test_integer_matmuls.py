"""Matmuls and convolutions of bytes: exact on every machine, for whatever zero points; whole models quantized by
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
from placed_arrays import guarded, unaligned
from this_machine import TARGETS

import lowering
from lowering.checking.references import create_session_options
from lowering.errors import NodeError

from .expectations import model, value_info

SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
# Rows, depth and columns: words that are left over, one row and many, columns behind a panel.
SIZES = [(1, 64, 64), (5, 63, 50), (7, 130, 33), (150, 257, 129), (2, 1, 4), (3, 2, 70), (13, 1030, 5), (6, 31, 3)]


def numbers(rng: np.random.Generator, dtype: str, shape: Any) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def node(name: str, given: dict[str, np.ndarray | None], known: set[str], rows: str | None) -> onnx.ModelProto:
    """A model of one node; `known` are constants, the first axis of A is `rows` if that is a name."""
    names = [n if x is not None else "" for n, x in given.items()]
    while not names[-1]:
        names.pop()
    there = {n: x for n, x in given.items() if x is not None}
    inputs = [
        value_info(n, x.dtype.name, [rows, *x.shape[1:]] if rows and n == "a" else x.shape)
        for n, x in there.items()
        if n not in known
    ]
    constants = [numpy_helper.from_array(x, n) for n, x in there.items() if n in known]
    dims = ["y0", "y1"]
    return model([helper.make_node(name, names, ["y"])], inputs, [value_info("y", "int32", dims)], 21, constants)


def exact(given: dict[str, np.ndarray | None]) -> np.ndarray:
    a, b, a_zero, b_zero = (None if x is None else x.astype(np.int64) for x in given.values())
    assert a is not None and b is not None
    a_zero = a_zero[:, None] if a_zero is not None and a_zero.ndim else a_zero
    matmul = (a - (0 if a_zero is None else a_zero)) @ (b - (0 if b_zero is None else b_zero))
    return np.asarray(matmul.astype(np.int32))


def drawn(rng: random.Random, data: np.random.Generator) -> tuple[dict[str, np.ndarray | None], set[str]]:
    m, k, n = rng.choice(SIZES)
    of_a, of_b = (rng.choice(["uint8", "int8"]) for _ in range(2))
    zero_a, zero_b = rng.choice([None, (), (m,)]), rng.choice([None, (), (n,)])
    given = {
        "a": numbers(data, of_a, (m, k)),
        "b": numbers(data, of_b, (k, n)),
        "a_zero": None if zero_a is None else numbers(data, of_a, zero_a),
        "b_zero": None if zero_b is None else numbers(data, of_b, zero_b),
    }
    known = {"b"} if rng.random() < 0.8 else set()
    return given, known | ({"b_zero"} if rng.random() < 0.8 else set()) | ({"a_zero"} if rng.random() < 0.2 else set())


@pytest.mark.parametrize("seed", range(24))
def test_matmuls_are_exact(seed: int) -> None:
    rng, data = random.Random(seed), np.random.default_rng(seed)
    given, known = drawn(rng, data)
    symbolic = rng.random() < 0.5 and (given["a_zero"] is None or given["a_zero"].ndim == 0)
    made = lowering.compile(
        node("MatMulInteger", given, known, "rows" if symbolic else None), TARGETS[seed % len(TARGETS)]
    )
    for place in (lambda x: guarded(x, True), lambda x: guarded(x, False), unaligned):
        feed = {n: place(x) for n, x in given.items() if x is not None and n not in known}
        np.testing.assert_array_equal(made.run(feed)["y"], exact(given))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_sizes_that_the_run_decides(batch: tuple[int, ...], target: str) -> None:
    """Words of a depth that nobody knew hold what there is, and read nothing behind it."""
    dims = [f"b{n}" for n in range(len(batch))]
    inputs = [value_info("a", "uint8", [*dims, "m", "k"]), value_info("b", "int8", [*dims, "k", "n"])]
    outputs = [value_info("y", "int32", [*dims, "m", "n"])]
    made = lowering.compile(model([helper.make_node("MatMulInteger", ["a", "b"], ["y"])], inputs, outputs, 21), target)
    data = np.random.default_rng(0)
    for k, (m, n) in enumerate([(3, 40), (70, 5), (1, 66), (30, 65), (9, 9), (2, 2), (65, 64), (5, 130)]):
        a, b = numbers(data, "uint8", (*batch, m, k)), numbers(data, "int8", (*batch, k, n))
        for place in (lambda x: guarded(x, True), lambda x: guarded(x, False), unaligned):
            y = made.run({"a": place(a), "b": place(b)})["y"]
            np.testing.assert_array_equal(y, a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("low", [-128, 127])
def test_sums_are_neither_saturated_nor_rounded(target: str, low: int) -> None:
    """Pairs of matmuls leave 16 bits; sums of 70,000 leave 32, and are what is left modulo 2^32."""
    given: dict[str, np.ndarray | None] = {
        "a": np.full((2, 70_000), 255, np.uint8),
        "b": np.full((70_000, 5), low, np.int8),
        "a_zero": None,
        "b_zero": None,
    }
    made = lowering.compile(node("MatMulInteger", given, {"b"}, None), target)
    np.testing.assert_array_equal(made.run({"a": given["a"]})["y"], exact(given))


@pytest.mark.parametrize("depth", [8, 15, 16, 40])
def test_bytes_that_the_model_widens_itself(depth: int) -> None:
    """LLVM makes matmuls of bytes of such loops where the machine has them, wrong ones in version 22."""
    nodes = [helper.make_node("Cast", [name], [f"{name}_wide"], to=onnx.TensorProto.INT32) for name in "ab"]
    nodes.append(helper.make_node("MatMul", ["a_wide", "b_wide"], ["y"]))
    inputs = [value_info("a", "uint8", (3, depth)), value_info("b", "int8", (depth,))]
    made = lowering.compile(model(nodes, inputs, [value_info("y", "int32", (3,))], 21))
    data = np.random.default_rng(depth)
    a, b = numbers(data, "uint8", (3, depth)), numbers(data, "int8", depth)
    np.testing.assert_array_equal(made.run({"a": a, "b": b})["y"], a.astype(np.int32) @ b.astype(np.int32))


def test_one_or_two_threads() -> None:
    data = np.random.default_rng(0)
    given = {"a": numbers(data, "uint8", (300, 128)), "b": numbers(data, "int8", (128, 200)), "z": None, "y": None}
    made = lowering.compile(node("MatMulInteger", given, {"b"}, "rows"))
    for threads in (1, 2):
        np.testing.assert_array_equal(made.run({"a": given["a"]}, threads=threads)["y"], exact(given))


@pytest.mark.parametrize("seed", range(12))
def test_convolutions_are_those_of_onnxruntime(seed: int) -> None:
    """Strides, dilations, pads, groups; the padding stands for the zero point."""
    rng, data = random.Random(seed), np.random.default_rng(seed)
    group, of_group = rng.choice([(1, 3), (1, 8), (2, 4), (4, 1)])
    kernel, outputs = rng.choice([1, 2, 3]), group * rng.choice([1, 4, 9])
    x = numbers(data, "uint8", (2, group * of_group, 9, 11))
    w = numbers(data, rng.choice(["uint8", "int8"]), (outputs, of_group, kernel, kernel))
    zeros = {"xz": numbers(data, "uint8", ()), "wz": numbers(data, w.dtype.name, ())}
    attributes: dict[str, Any] = {"group": group, "strides": [rng.choice([1, 2])] * 2}
    attributes["pads"] = [rng.choice([0, 1]) for _ in range(4)]
    made = helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], **attributes)
    inputs = [value_info("x", "uint8", ["n", *x.shape[1:]]), value_info("xz", "uint8", ())]
    constants = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(zeros["wz"], "wz")]
    whole = model([made], inputs, [value_info("y", "int32", ["n", "c", "h", "v"])], 21, constants)
    feed = {"x": x, "xz": zeros["xz"]}
    wide = [(v.astype(np.float64) - zeros[z].astype(np.float64)) for v, z in ((x, "xz"), (w, "wz"))]
    convolution = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    shapes = [value_info(n, "float64", v.shape) for n, v in zip("xw", wide)]
    truth = model([convolution], shapes, [value_info("y", "float64", ["n", "c", "h", "v"])], 21)
    want = lowering.compile(truth).run(dict(zip("xw", wide)))["y"]
    np.testing.assert_array_equal(lowering.compile(whole, TARGETS[seed % len(TARGETS)]).run(feed)["y"], want)


def test_dynamic_quantization_of_zeros() -> None:
    """Where all numbers are 0, so are all codes."""
    made = helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])
    outputs = [value_info("y", "uint8", ["n"]), value_info("s", "float32", ()), value_info("z", "uint8", ())]
    whole = lowering.compile(model([made], [value_info("x", "float32", ["n"])], outputs, 21))
    found = whole.run({"x": np.zeros(7, np.float32)})
    assert not found["y"].any() and found["z"] == 0 and found["s"] == np.float32(1) / 255


def test_other_types_are_refused() -> None:
    given = {"a": np.zeros((2, 3), np.int32), "b": np.zeros((3, 2), np.int8), "a_zero": None, "b_zero": None}
    whole = node("MatMulInteger", given, set(), None)
    with pytest.raises(NodeError, match=r"A has type int32.*uint8 or int8"):
        lowering.compile(whole)


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
    """What calibration reads."""

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
    """Of quantize_dynamic and quantize_static: errors from float64 are those of onnxruntime, and answers a step of
    quantization from its own at most."""
    options = dict(FORMS)[form]
    path, source = tmp_path / "quantized.onnx", SAMPLES / name / "model.onnx"
    calls = [dict(np.load(call)) for call in sorted((SAMPLES / name).glob("*.npz"))]
    feeds = [{n: x for n, x in arrays.items() if not n.startswith("=")} for arrays in calls]
    if "quant_format" in options:
        quantize_static(source, path, Calls(feeds), **options)
    else:
        quantize_dynamic(source, path, **options)
    made = lowering.compile(path)
    session = onnxruntime.InferenceSession(str(path), create_session_options())
    names = [output.name for output in session.get_outputs()]
    assert any(kernel.schedule == "matmul" for kernel in made.manifest.kernels)
    for arrays, feed in zip(calls, feeds):
        ours, theirs = made.run(feed), dict(zip(names, session.run(names, feed)))
        for output in names:
            truth = arrays[f"={output}"]
            size = float(np.ptp(truth))
            errors = [float(np.abs(found[output] - truth).max()) / size for found in (ours, theirs)]
            apart = float(np.abs(ours[output] - theirs[output]).max()) / size
            assert errors[0] <= 1.3 * errors[1] + 2e-3 and apart <= max(1.2 * errors[1], 4e-3), (output, errors, apart)
