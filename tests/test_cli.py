"""The commands, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from lowering.cli import main

ATTENTION = """
<ir_version: 10, opset_import: ["" : 24]>
model (float[B, 4, S, 16] q, float[B, 2, T, 16] k, float[B, 2, T, 16] v) => (float[B, 4, S, 16] y) {
  [attend] y = Attention <is_causal = 1> (q, k, v)
}
"""
UNKNOWN = """
<ir_version: 10, opset_import: ["" : 24, "com.example" : 1]>
model (float[N] x) => (float[N] z, float[N] w) {
  [odd] y = com.example.Frobnicate (x)
  z = Relu (y)
  [odder] w = com.example.Frobnicate (z)
}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(ATTENTION), path)
    return path


def test_compile_then_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = tmp_path / "artifact"
    assert main(["compile", str(model), "--target", "cpu", "-o", str(artifact)]) == 0
    assert "q: float32['B', 4, 'S', 16]" in capsys.readouterr().out
    rng = np.random.default_rng(0)
    options = []
    for name, heads, length in (("q", 4, 5), ("k", 2, 7), ("v", 2, 7)):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal((2, heads, length, 16)).astype(np.float32))
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    assert main(["run", str(artifact), *options, "--output-dir", str(tmp_path / "out")]) == 0
    y = np.load(tmp_path / "out" / "y.npy")
    feeds = {name: np.load(tmp_path / f"{name}.npy") for name in "qkv"}
    expected = onnx.reference.ReferenceEvaluator(str(model)).run(None, feeds)[0]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("against", ["reference", "onnxruntime"])
def test_verify(model: Path, against: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "--against", against, "--dim", "S=3", "--dim", "T=9"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("y: max abs") and f"all outputs agree with {against}" in out


def test_verify_reports_the_first_difference(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A tolerance of nothing at all: float32 sums in another order differ somewhere.
    assert main(["verify", str(model), "--dim", "S=31", "--dim", "T=65", "--rtol", "0", "--atol", "0"]) == 1
    assert "first output that differs: y" in capsys.readouterr().out


def test_check_lists_every_blocked_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "unknown.onnx"
    onnx.save(onnx.parser.parse_model(UNKNOWN), path)
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "com.example.Frobnicate-1 'odd'" in out and "com.example.Frobnicate-1 'odder'" in out
    assert "3 nodes, 2 cannot be lowered, 1 behind them could not be examined" in out
    assert main(["check", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and report["findings"][0]["where"].endswith("'odd'")


def test_check_of_a_good_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(model)]) == 0
    assert "1 nodes, 0 cannot be lowered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "missing.onnx", "-o", "out"], "There is no file missing.onnx"),
        (["compile", "MODEL", "-o", "out", "--target", "tpu"], "There is no target 'tpu'"),
        (["compile", "MODEL", "-o", "out", "--cc", "no-such-cc"], "'no-such-cc', which is not installed"),
        (["compile", "MODEL", "-o", "out", "--donate", "cache.*"], "matches no input. The inputs are: q, k, v."),
        (["compile", "MODEL", "-o", "out", "--donate", "q"], "input 'q' cannot be donated"),
        (["compile", "MODEL", "-o", "out", "--dim", "S"], "write NAME=LOW..HIGH"),
        (["compile", "MODEL", "-o", "out", "--dim", "Z=1..8"], "There are: B, S, T."),
        (["run", "nowhere"], "nowhere"),
        (["verify", "MODEL", "--dim", "S"], "write NAME=SIZE"),
        (["verify", "MODEL", "--input", "q"], "write NAME=FILE.npy"),
    ],
)
def test_errors_are_one_plain_sentence(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, message
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(model) if a == "MODEL" else a for a in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_sizes_outside_the_range_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(model), "-o", str(tmp_path / "a"), "--dim", "S=1..4"]) == 0
    options = []
    for name, heads, length in (("q", 4, 5), ("k", 2, 7), ("v", 2, 7)):
        np.save(tmp_path / f"{name}.npy", np.zeros((2, heads, length, 16), np.float32))
        options += ["--input", f"{name}={tmp_path / name}.npy"]
    capsys.readouterr()
    assert main(["run", str(tmp_path / "a"), *options]) == 1
    assert "'S'" in capsys.readouterr().err


def test_dump_dir_shows_every_pass(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    assert main(["compile", str(model), "-o", str(tmp_path / "a"), "--dump-dir", str(folder)]) == 0
    names = sorted(p.name for p in folder.iterdir())
    assert names[0] == "01_canonicalize.py" and any(n.endswith("_schedule.py") for n in names)
