"""Row blocks: quantized attention in one kernel equals its separate kernels bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import lowering
from tests.support.pass_states import leave_out
from tests.support.placed_arrays import guarded, unaligned
from tests.support.this_machine import TARGETS

RNG = np.random.default_rng(0)

SCORES = "m = MatMul (q, k) mc = QuantizeLinear (m, ms, z) md = DequantizeLinear (mc, ms, z)"
MASKS = {
    "none": ("", "c = Mul (md, scale)"),
    "added": (", float[B, 1, S, T] mask", "c = Add (md, mask)"),
    "chosen": (", bool[B, 1, 1, T] mask", "c = Where (mask, md, low)"),
    "rounded": (
        ", float[B, 1, S, T] mask",
        "a = Add (md, mask) ac = QuantizeLinear (a, ms, z) c = DequantizeLinear (ac, ms, z)",
    ),
}
PROBABILITIES = """p = Softmax <axis = -1> (c) pc = QuantizeLinear (p, ps, pz) pd = DequantizeLinear (pc, ps, pz)
    n = IsNaN (pd) g = Where (n, zero, pd) gc = QuantizeLinear (g, gs, pz) gd = DequantizeLinear (gc, gs, pz)"""


def attention(
    mask: str = "none",
    code: str = "uint8",
    shapes: tuple[str, str, str, str] = ("B, 3, S, 20", "B, 3, 20, T", "B, 3, T, 33", "B, 3, S, 33"),
    more: str = "",
    nodes: str | None = None,
    v_scale: str = "vs",
) -> onnx.ModelProto:
    """Return attention with quantized Q, K, V and Y. `more` are further outputs."""
    q, k, v, y = shapes
    mask_input, masked = MASKS[mask]
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    m ({code}[{q}] qc, {code}[{k}] kc, {code}[{v}] vc{mask_input}) => ({code}[{y}] y{more}) {{
      q = DequantizeLinear (qc, qs, zq) k = DequantizeLinear (kc, ks, zk)
      v = DequantizeLinear <axis = -1> (vc, {v_scale})
      {SCORES} {masked} {nodes or PROBABILITIES}
      o = MatMul (gd, v) y = QuantizeLinear (o, os, z) }}"""
    model = onnx.parser.parse_model(text.replace("(vc, vs)", "(vc, vs, zv)"))
    scales = {"qs": 0.02, "ks": 0.03, "vs": 0.01, "ms": 0.05, "ps": 1 / 255, "gs": 0.003, "os": 0.01, "scale": 0.7}
    middle = 128 if code == "uint8" else 0
    zeros = {"zq": middle + 5, "zk": middle - 9, "zv": middle + 3, "z": middle, "pz": 0 if code == "uint8" else -128}
    arrays: dict[str, Any] = {name: np.array(scale, np.float32) for name, scale in scales.items()}
    arrays |= {name: np.array(zero, code) for name, zero in zeros.items()}
    arrays |= {"zero": np.array(0, np.float32), "low": np.array(-np.inf, np.float32)}
    arrays["columns"] = np.linspace(0.005, 0.02, int(v.split(", ")[-1])).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def inputs(model: onnx.ModelProto, rng: np.random.Generator, **sizes: int) -> dict[str, np.ndarray]:
    feeds: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        if dtype.kind == "b":
            feeds[value.name] = rng.random(shape) < 0.6
            feeds[value.name][..., :1] = True
        elif dtype == np.float32:
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            info = np.iinfo(dtype)
            feeds[value.name] = rng.integers(info.min, info.max + 1, shape).astype(dtype)
    return feeds


def has_row_blocks(model: lowering.Model) -> bool:
    return any(kernel.schedule == "row_blocks" for kernel in model.manifest.kernels)


def compile_separately(model: onnx.ModelProto, target: str) -> lowering.Model:
    """Compile the model to separate kernels."""
    with leave_out("fuse_row_blocks"):
        separate = lowering.compile(model, target)
    assert not has_row_blocks(separate)
    return separate


CASES = [
    ("none", "uint8", "vs", "cpu"),
    ("added", "int8", "vs", TARGETS[-1]),
    ("chosen", "uint8", "columns", "cpu:x86-64-v3"),
    ("rounded", "int8", "columns", "cpu"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("mask", "code", "v_scale", "target"), CASES)
def test_results_are_those_of_separate_kernels(
    mask: str, code: str, v_scale: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attention(mask, code, v_scale=v_scale)
    fused, separate = lowering.compile(model, target), compile_separately(model, target)
    assert has_row_blocks(fused)
    reference = ReferenceEvaluator(model)
    for sizes in ((1, 1, 1), (2, 7, 5), (1, 130, 67), (2, 1, 300), (1, 97, 1030), (3, 6, 64), (1, 9, 4500)):
        feeds = inputs(model, RNG, **dict(zip("BST", sizes)))
        want = separate.run(feeds)["y"]
        for threads in (1, 2):
            for allocate in (lambda x: guarded(x, True), lambda x: guarded(x, False), unaligned):
                y = fused.run({name: allocate(array) for name, array in feeds.items()}, threads=threads)["y"]
                np.testing.assert_array_equal(y, want)
        # A probability next to the middle between two quantized values may be rounded the other way.
        distance = np.abs(reference.run(None, feeds)[0].astype(int) - want)
        assert distance.max() <= 2 and (distance > 0).mean() < 0.02


SHAPES = [
    ("2, 3, S, 8", "2, 1, 8, T", "2, 1, T, 8", "2, 3, S, 8"),  # heads share keys and values
    ("1, 4, 50, 8", "1, 4, 8, 50", "1, 4, 50, 8", "1, 4, 50, 8"),  # a batch of one, as a number
    ("S, 8", "8, T", "T, 8", "S, 8"),
]


@pytest.mark.parametrize("shapes", SHAPES)
def test_any_axes_of_rows(shapes: tuple[str, str, str, str]) -> None:
    model = attention(shapes=shapes)
    fused, separate = lowering.compile(model), compile_separately(model, "cpu")
    assert has_row_blocks(fused)
    for sizes in ((1, 3, 4), (2, 111, 70)):
        feeds = inputs(model, RNG, **dict(zip("BST", sizes)))
        np.testing.assert_array_equal(fused.run(feeds)["y"], separate.run(feeds)["y"])


def test_sizes_of_nothing() -> None:
    model = attention()
    fused, separate = lowering.compile(model), compile_separately(model, "cpu")
    for sizes in ((0, 3, 4), (1, 0, 4), (2, 3, 0)):
        feeds = inputs(model, RNG, **dict(zip("BST", sizes)))
        np.testing.assert_array_equal(fused.run(feeds)["y"], separate.run(feeds)["y"])


def test_hidden_keys_do_not_count() -> None:
    model = attention("chosen")
    compiled = lowering.compile(model)
    feeds = inputs(model, RNG, B=2, S=40, T=90)
    other = inputs(model, RNG, B=2, S=40, T=90) | {name: feeds[name] for name in ("qc", "mask")}
    hidden = ~feeds["mask"]
    keys, values = np.where(hidden, other["kc"], feeds["kc"]), np.where(hidden.swapaxes(2, 3), other["vc"], feeds["vc"])
    changed = compiled.run(feeds | {"kc": keys, "vc": values})["y"]
    np.testing.assert_array_equal(changed, compiled.run(feeds)["y"])


def of_weights() -> onnx.ModelProto:
    """Return a model whose keys are constants."""
    model = attention(shapes=("B, 3, S, 20", "1, 3, 20, 64", "B, 3, 64, 33", "B, 3, S, 33"))
    keys = model.graph.input.pop(1)
    model.graph.initializer.append(
        numpy_helper.from_array(RNG.integers(0, 256, (1, 3, 20, 64)).astype(np.uint8), keys.name)
    )
    return model


NOT_JOINED = {
    "keys that are weights": of_weights(),
    "scores that are an output": attention(more=", float[B, 3, S, T] md"),
    "probabilities that are an output": attention(more=", uint8[B, 3, S, T] gc"),
    "a softmax over the queries": attention(
        nodes="p = Softmax <axis = 2> (c) gc = QuantizeLinear (p, gs, pz) gd = DequantizeLinear (gc, gs, pz)"
    ),
}


@pytest.mark.parametrize("case", NOT_JOINED)
def test_others_stay_apart(case: str) -> None:
    model = NOT_JOINED[case]
    compiled = lowering.compile(model)
    assert not has_row_blocks(compiled)
    feeds = inputs(model, RNG, B=2, S=9, T=11)
    want = ReferenceEvaluator(model).run(None, feeds)
    assert np.abs(compiled.run(feeds)["y"].astype(int) - want[0].astype(int)).max() <= 2
