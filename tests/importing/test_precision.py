"""precision=: matmuls in half precision, norms and softmax in float32, inputs and outputs as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.choices import Precision
from lowering.commands.cli import main
from lowering.fusion import fuse
from lowering.graph.loading.model import load_model
from lowering.graph.options.precision import use_precision
from lowering.target import host_features
from tests.support.error_codes import raises

SAMPLES = Path(__file__).parents[1] / "exports" / "samples"
BARS = {"float16": 5e-3, "bfloat16": 4e-2}
NAMES = [path.name for path in sorted(SAMPLES.iterdir()) if not path.name.endswith("f16")]


@pytest.mark.sampled(13)
@pytest.mark.parametrize(("name", "precision"), [(n, p) for n in NAMES for p in BARS])
def test_exports(name: str, precision: Precision) -> None:
    """As near to PyTorch in float64 as the type allows; what differs of inputs and outputs are caches."""
    model = lowering.compile(SAMPLES / name / "model.onnx", precision=precision)
    graph = load_model(SAMPLES / name / "model.onnx").graph
    declared = {value.name: value.dtype for value in (*graph.inputs, *graph.outputs)}
    kind = np.dtype(getattr(ml_dtypes, precision, precision))
    for spec in (*model.inputs, *model.outputs):
        cache = "past" in name and len(spec.dims) == 4 and spec.dtype == precision
        assert cache or spec.dtype == ir.DataType(declared[spec.name]).numpy().name
    for path in sorted((SAMPLES / name).glob("*.npz")):
        with np.load(path) as arrays:
            types = {spec.name: np.dtype(kind if spec.dtype == precision else spec.dtype) for spec in model.inputs}
            results = model.run({k: arrays[k].astype(types[k]) for k in arrays.files if not k.startswith("=")})
            for key in (key for key in arrays.files if key.startswith("=")):
                difference = results[key[1:]].astype("float64") - arrays[key]
                assert np.abs(difference).max() / np.ptp(arrays[key]) < BARS[precision], key


MODEL = """
<ir_version: 10, opset_import: ["" : 23]>
model (float[b, s, 16] x, bool[b, 1, s, s] seen) => (float[b, s, 16] y, float[b, s, s] p) <
  float[16, 16] w = {WEIGHTS}, float[16] gain = {GAIN}, float hidden = {-3.4e38}, float zero = {0.0}>
{
  h = MatMul (x, w)
  n = RMSNormalization (h, gain)
  t = Transpose <perm = [0, 2, 1]> (n)
  scores = MatMul (n, t)
  shown = Squeeze (seen, axis)
  mask = Where (shown, zero, hidden)
  masked = Add (scores, mask)
  p = Softmax (masked)
  v = MatMul (p, h)
  y = Add (x, v)
}
"""


def model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = ", ".join(f"{x:.4f}" for x in rng.standard_normal(256) / 4)
    text = MODEL.replace("WEIGHTS", weights).replace("GAIN", ", ".join(["1.0"] * 16))
    return onnx.parser.parse_model(text.replace("float zero", "int64[1] axis = {1}, float zero"))


@pytest.mark.parametrize("precision", BARS)
def test_what_stays_float32(precision: Precision) -> None:
    fused = load_model(model())
    note = use_precision(fused, precision)
    types = {node.op_type: {str(v.dtype) for v in node.outputs} for node in fused.graph}
    half = precision.upper()
    assert types["MatMul"] == types["RMSNormalization"] == {half}
    assert types["Softmax"] == types["Add"] == {"FLOAT"}  # float16 has no number that hides keys
    assert [str(v.dtype) for v in (*fused.graph.inputs, *fused.graph.outputs)] == ["FLOAT", "BOOL", "FLOAT", "FLOAT"]
    assert {str(v.dtype) for v in fused.graph.initializers.values() if v.name.startswith("w")} == {half}
    assert note.startswith(f"precision: 3 matmuls are computed in {precision}")
    assert "beyond its range" not in note


@pytest.mark.parametrize("precision", BARS)
def test_hidden_keys_stay_hidden(precision: Precision) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 5, 16)).astype("float32")
    seen = rng.random((2, 1, 5, 5)) < 0.6
    seen[:, :, np.arange(5), np.arange(5)] = True
    feeds = {"x": x, "seen": seen}
    want, got = (lowering.compile(model(), precision=p).run(feeds) for p in (None, precision))
    np.testing.assert_allclose(got["y"], want["y"], atol=10 * BARS[precision])
    assert (got["p"][~seen[:, 0]] == 0).all()


def test_an_overflow_is_what_float16_says() -> None:
    """Sums beyond float16 are infinite where they are stored so, and finite in bfloat16."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23]> m (float[2, 64] x, float[64, 2] w) => (float[2, 2] y)'
        " { h = MatMul (x, w) y = Relu (h) }"
    )
    feeds = {"x": np.full((2, 64), 60.0, "float32"), "w": np.full((64, 2), 60.0, "float32")}
    assert np.isinf(lowering.compile(proto, precision="float16").run(feeds)["y"]).all()
    np.testing.assert_allclose(lowering.compile(proto, precision="bfloat16").run(feeds)["y"], 230400, rtol=1e-2)


def test_branches_read_float32() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 23]>
    m (float[2, 8] x, float[8, 8] w, bool c) => (float[2, 8] y)
    {
      h = MatMul (x, w)
      y = If (c) <
        then_branch = t () => (float[2, 8] a) { a = Softmax (h) },
        else_branch = e () => (float[2, 8] b) { b = Identity (h) }
      >
    }
    """
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(2)
    feeds = {"x": rng.standard_normal((2, 8)).astype("float32"), "w": rng.standard_normal((8, 8)).astype("float32")}
    for chosen in (True, False):
        want, got = (
            lowering.compile(proto, precision=p).run({**feeds, "c": np.array(chosen)})["y"] for p in (None, "float16")
        )
        np.testing.assert_allclose(got, want, atol=2e-2)


def test_nothing_changes_without_matmuls() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23]> m (float[n] x) => (float[n] y) { h = Exp (x) y = Add (h, x) }'
    )
    fused = fuse(load_model(proto))
    before = [(node.op_type, node.outputs[0].dtype) for node in fused.graph]
    use_precision(fused, "float16")
    assert [(node.op_type, node.outputs[0].dtype or ir.DataType.FLOAT) for node in fused.graph] == [
        (op, dtype or ir.DataType.FLOAT) for op, dtype in before
    ]


HERE = bool({"avx512_bf16"} & set(host_features()))


@pytest.mark.parametrize("name", ["llama-past-dynamo23", "whisper-past-dynamo23-f16", "distilbert-traced17"])
def test_fast(name: str) -> None:
    """Matmuls in bfloat16 where the machine has them, and the model's own types outside, those of caches too."""
    path = SAMPLES / name / "model.onnx"
    model, graph = lowering.compile(path, precision="fast"), load_model(path).graph
    (note,) = (note for note in model.manifest.notes if note.startswith("precision"))
    assert note.startswith("precision: fast changes nothing") != HERE
    assert ("matmuls are computed in bfloat16" in note) == HERE
    declared = {value.name: ir.DataType(value.dtype).numpy().name for value in (*graph.inputs, *graph.outputs)}
    assert {spec.name: spec.dtype for spec in (*model.inputs, *model.outputs)} == declared
    for file in sorted(path.parent.glob("*.npz")):
        with np.load(file) as arrays:
            results = model.run({k: arrays[k].astype(declared[k]) for k in arrays.files if not k.startswith("=")})
            for key in (key for key in arrays.files if key.startswith("=")):
                difference = results[key[1:]].astype("float64") - arrays[key]
                assert np.abs(difference).max() / np.ptp(arrays[key]) < BARS["bfloat16"], key


def test_fast_is_not_for_every_machine() -> None:
    """Without matmuls of bfloat16 a model is what it was; an attention that reads a cache is so everywhere."""
    path = SAMPLES / "llama-past-dynamo23" / "model.onnx"
    other = lowering.compile(path, "cpu:x86-64-v3", precision="fast")
    assert [note for note in other.manifest.notes if note.startswith("precision: fast changes nothing")]
    fused = fuse(load_model(path)).clone()
    use_precision(fused, "fast", ("float32", "float16"))
    types = {node.op_type: {str(v.dtype) for v in node.outputs if v.dtype} for node in fused.graph}
    assert types["MatMul"] == {"BFLOAT16"} and types["Attention"] == {"FLOAT"}


def test_unknown_types_are_refused() -> None:
    with raises("precision.name_unknown"):
        lowering.compile(model(), precision="int8")


LARGE = """
<ir_version: 10, opset_import: ["" : 23]>
m (float[n, 16] x, float[n, n] hide) => (float[n, 8] y, float[n, n] p) <
  float[16, 64] up = {UP}, float[64, 8] down = {DOWN}>
{
  a = MatMul (x, up)
  s = Mul (a, a)
  b = MatMul (s, down)
  y = RMSNormalization (b, gain)
  t = Transpose <perm = [1, 0]> (y)
  scores = MatMul (y, t)
  masked = Add (scores, hide)
  p = Softmax (masked)
}
"""


def large(scale: float) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Squares of numbers of about `scale`, and a mask; what it is called with."""
    rng = np.random.default_rng(0)
    up, down = (", ".join(f"{x:.4f}" for x in rng.standard_normal(n)) for n in (16 * 64, 64 * 8))
    text = LARGE.replace("UP", up).replace("DOWN", down)
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(8, np.float32), "gain"))
    hide = np.where(np.tri(5, dtype=bool), 0, np.finfo(np.float32).min).astype(np.float32)
    return model, {"x": (scale / 4 * rng.standard_normal((5, 16))).astype(np.float32), "hide": hide}


def test_numbers_that_float16_cannot_represent(tmp_path: Path) -> None:
    """On calls that have them, the tensors between stay float32; the matmuls before and after become float16."""
    proto, call = large(1000)
    reference = onnx.reference.ReferenceEvaluator(proto).run(None, call)
    plain = lowering.compile(proto, precision="float16").run(call)
    assert not np.isfinite(plain["y"]).all()
    module = lowering.compile(proto, precision="float16", calls=[{"x": call["x"] * 0, "hide": call["hide"]}, call])
    assert any(
        "2 matmuls are computed in float16" in note and "3 of these for" in note for note in module.manifest.notes
    )
    for actual, expected in zip(module.run(call).values(), reference):
        np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-3)

    np.savez(tmp_path / "call.npz", **call)
    onnx.save(proto, tmp_path / "m.onnx")
    command = ["compile", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "out"), "--precision", "float16"]
    assert main([*command, "--calls", str(tmp_path / "call.npz")]) == 0
    for actual, expected in zip(lowering.load(tmp_path / "out").run(call).values(), reference):
        np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=2e-3)

    command = ["verify", str(tmp_path / "m.onnx"), "--precision", "float16"]
    for name, array in call.items():
        np.save(tmp_path / f"{name}.npy", array)
        command += ["--input", f"{name}={tmp_path / name}.npy"]
    assert main(command) == 1
    command += ["--calls", str(tmp_path / "call.npz")]
    assert main(command) == 0
    assert main([*command, "--reduce", str(tmp_path / "small")]) == 1 and not (tmp_path / "small").exists()
    assert main([*command[:2], "--artifact", str(tmp_path / "out"), *command[4:]]) == 1  # which has its own


def test_numbers_that_float16_represents_change_nothing() -> None:
    proto, call = large(1)
    before, after = (lowering.compile(proto, precision="float16", calls=calls) for calls in ((), (call,)))
    assert before.manifest.notes == after.manifest.notes


def test_outputs_that_are_left_out_are_not_looked_at() -> None:
    text = """<ir_version: 10, opset_import: ["" : 23]>
        m (float[B, 2, T, 16] x) => (float[B, 2, T, 16] y, float[B, 2, T, T] p) {
          y, , , p = Attention <qk_matmul_output_mode = 3> (x, x, x)
        }"""
    proto = onnx.parser.parse_model(text)
    call = {"x": np.random.default_rng(0).standard_normal((1, 2, 5, 16), "f")}
    y, p = lowering.compile(proto, precision="float16", calls=[call]).run(call).values()
    assert np.isfinite(y).all() and np.allclose(p.sum(axis=-1), 1, atol=1e-2)


def test_calls_that_are_none_of_the_model() -> None:
    proto, call = large(1)
    with raises("option.calls_mismatch"):
        lowering.compile(proto, precision="float16", calls=[call, {**call, "x": call["x"][:, :3]}])
    wrong: Any
    for wrong in (call, [call, "x"]):
        with raises("option.calls_invalid"):
            lowering.compile(proto, precision="float16", calls=wrong)
    with raises("option.calls_unused"):
        lowering.compile(proto, precision="bfloat16", calls=[call])


def test_the_model_that_is_given_stays_as_it_is() -> None:
    """Copies of onnx_ir's models share their types."""
    model = ir.from_proto(onnx.load(SAMPLES / "llama-past-dynamo23" / "model.onnx"))
    types = [value.dtype for value in model.graph.inputs]
    assert lowering.compile(model, precision="float16").inputs[-1].dtype == "float16"
    assert [value.dtype for value in model.graph.inputs] == types
