"""`verify`: inputs that fit, tolerances that sound models meet and unsound ones do not, and who cannot run a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import lowering
from lowering.checking import trial
from lowering.checking.made_up import made_up
from lowering.commands.cli import main
from lowering.manifest import TensorSpec

ROWS, POSITIONS, WIDTH = 50, 12, 96


def encoder(seed: int = 0, dtype: Any = np.float32) -> onnx.ModelProto:
    """Embeddings of ids and positions, and two products; what a mask hides is 0."""
    text = """<ir_version: 10, opset_import: ["" : 23]>
        m (int64[B, T] ids, int64[B, T] position_ids, int64[B, T] attention_mask) => (float[B, T, 96] y) {
          e = Gather (words, ids)
          flat = Reshape (position_ids, shape)
          p = Gather (places, flat)
          like = Shape (e)
          q = Reshape (p, like)
          x = Add (e, q)
          h = MatMul (x, up)
          g = Tanh (h)
          o = MatMul (g, down)
          kept = Cast <to = TYPE> (attention_mask)
          wide = Unsqueeze (kept, last)
          y = Mul (o, wide)
        }"""
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    text = text.replace("TYPE", str(kind)).replace("float[", "float16[" if dtype == np.float16 else "float[")
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(seed)
    sizes = {"words": (ROWS, WIDTH), "places": (POSITIONS, WIDTH), "up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}
    arrays = {name: (rng.standard_normal(size) / np.sqrt(WIDTH)).astype(dtype) for name, size in sizes.items()}
    arrays |= {"shape": np.array([-1]), "last": np.array([-1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def test_what_is_made_up_fits_the_graph() -> None:
    graph, rng = ir.from_proto(encoder()).graph, np.random.default_rng(0)
    sizes = {"B": 40, "T": 16}
    names = ("ids", "position_ids", "attention_mask")
    specs = [TensorSpec(name, "int64", "int64", ("B", "T")) for name in names]
    ids, positions, mask = made_up(graph, specs, sizes, rng).values()
    assert ids.min() == 0 and ids.max() == ROWS - 1 and len(np.unique(ids)) > ROWS // 2
    assert (positions == np.minimum(np.arange(16), POSITIONS - 1)).all()
    assert (np.sort(mask, axis=1) == mask).all() and set(np.unique(mask)) == {0, 1} and (mask.sum(axis=1) >= 8).all()
    (other,) = made_up(graph, [TensorSpec("lengths", "int64", "int64", ("B",))], sizes, rng).values()
    assert set(np.unique(other)) == {0, 1}


@pytest.mark.parametrize(
    "how", ["", "--weights=f16", "--weights=int8", "--weights=int4", "--precision=bfloat16", "f16"]
)
def test_a_sound_model_agrees(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(encoder(dtype=np.float16 if how == "f16" else np.float32), tmp_path / "m.onnx")
    options = [how] if how.startswith("-") else []
    assert main(["verify", str(tmp_path / "m.onnx"), "--json", "--seed", "3", *options]) == 0
    said = json.loads(capsys.readouterr().out)
    (y,) = said["comparisons"]
    assert said["ok"] and said["seed"] == 3 and y["close"]
    assert ("of itself" if how == "" else "of an output's rms") in said["allowed"]
    assert how in ("", "f16") or y["rms"] > 1e-5  # what is allowed is something that there is


@pytest.mark.parametrize("weights", [None, "int8"])
def test_an_unsound_one_does_not(monkeypatch: pytest.MonkeyPatch, weights: Any) -> None:
    """A wrong answer is found, however much its scheme may cost."""
    compiled = trial.compile

    def wrong(model: Any, *options: Any, **more: Any) -> lowering.Model:
        other = ir.to_proto(model)
        (down,) = (w for w in other.graph.initializer if w.name == "down")
        down.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(down) * np.float32(1.5), "down"))
        return compiled(other, *options, **more)

    assert lowering.verify(encoder(), weights=weights).first_difference is None
    monkeypatch.setattr(trial, "compile", wrong)
    assert lowering.verify(encoder(), weights=weights).first_difference is not None


def test_a_reference_that_cannot_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
        m (float[N, 8] x) => (float[N, 8] y) { y = com.microsoft.FastGelu (x) }"""
    monkeypatch.setattr(trial, "compile", lambda *_, **__: pytest.fail("compiled before"))
    with pytest.raises(lowering.LoweringError, match=r"reference evaluator cannot run .*--against onnxruntime may"):
        lowering.verify(onnx.parser.parse_model(text))
