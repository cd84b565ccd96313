"""The command `inspect`: what it says of an artifact, and that it loads nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lowering
from lowering.commands.cli import main
from lowering.demo.decoder import DecoderConfig, build_decoder

CONFIG = DecoderConfig(2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocabulary=50, positions=64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "out"
    lowering.compile(build_decoder(CONFIG), "cpu:x86-64-v3", donate=["cache_.*"], dims={"tokens": (1, 32)}).save(folder)
    return folder


def test_an_artifact_as_text(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact)]) == 0
    shown = capsys.readouterr().out
    manifest = lowering.load(artifact).manifest
    for text in (
        "Target: cpu:x86-64-v3, which needs ",
        "  ids: int64[batch, tokens]\n",
        "  cache_k.0: float32[batch, 2, capacity, 16], donated to present_k.0\n",
        "  logits: float32[batch, 50]\n",
        "Legal sizes: tokens: 1 to 32\n",
        f"Weights: {len(manifest.weights)}, ",
        f"{len(manifest.calls)} calls of {len(manifest.kernels)} kernels\n",
    ):
        assert text in shown
    (attention,) = [line for line in shown.splitlines() if " attention " in line]
    assert attention.split()[0] == "2" and "Attention layer0.attention" in attention


def test_every_call(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact), "--calls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("call "))
    assert [int(line.split()[0]) for line in lines[first + 1 :]] == list(range(len(lines) - first - 1))
    assert any("RotaryEmbedding layer1.q_rotated" in line for line in lines)


def test_as_json(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["donated"]["cache_v.1"] == "present_v.1" and report["ranges"] == {"tokens": [1, 32]}
    assert report["files"]["weights.bin"] == (artifact / "weights.bin").stat().st_size


def test_without_the_compiler_and_code_that_runs_here(artifact: Path, tmp_path: Path) -> None:
    """An artifact whose code is damaged is inspected in a process in which nothing can import TVM."""
    copy = tmp_path / "out"
    subprocess.run(["cp", "-r", artifact, copy], check=True)
    (copy / "model.so").write_bytes(b"no code")
    code = "import sys; sys.modules['tvm'] = None; from lowering.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "inspect", copy], capture_output=True, text=True)
    assert done.returncode == 0 and "ids: int64[batch, tokens]" in done.stdout, done.stderr


def test_what_is_no_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    assert "is not an artifact: it has no manifest.json" in capsys.readouterr().err
