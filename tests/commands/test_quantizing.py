"""onnx-lowering quantize: legal models that onnxruntime runs too, errors by node, and nothing half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
import pytest

import lowering
from lowering.checking.references import create_session_options
from lowering.commands.cli import main
from lowering.quantizing import quantize
from tests.support.error_codes import raises

SAMPLE = Path(__file__).parents[1] / "exports" / "samples" / "distilbert-traced17"


def calls() -> list[dict[str, np.ndarray]]:
    all_calls = []
    for path in sorted(SAMPLE.glob("*.npz")):
        with np.load(path) as arrays:
            all_calls.append({name: arrays[name] for name in arrays.files if not name.startswith("=")})
    return all_calls


@pytest.mark.parametrize("form", ["static", "dynamic"])
def test_models_in_8_bits(form: str, tmp_path: Path) -> None:
    quantized, all_calls = tmp_path / "q.onnx", calls()
    report = quantize(SAMPLE / "model.onnx", quantized, all_calls, form)  # type: ignore[arg-type]
    onnx.checker.check_model(onnx.load(quantized), full_check=True)
    operators = {(node.domain, node.op_type) for node in onnx.load(quantized).graph.node}
    assert ("", "MatMulInteger" if form == "dynamic" else "QuantizeLinear") in operators
    assert not {domain for domain, _ in operators} - {""}
    assert 0 < report.quantized <= report.matmuls
    assert report.nodes[0].error == max(entry.error for entry in report.nodes) > 0
    session, model = onnxruntime.InferenceSession(quantized, create_session_options()), lowering.compile(quantized)
    assert lowering.verify(quantized, against="onnxruntime").first_difference is None
    references = [lowering.compile(SAMPLE / "model.onnx").run(call) for call in all_calls]
    for call, reference in zip(all_calls, references):
        actual = model.run(call)
        for value, peer in zip(session.get_outputs(), session.run(None, call)):
            expected = np.asarray(reference[value.name], np.float64)
            error = np.sqrt(np.square(np.asarray(actual[value.name]) - expected).sum() / np.square(expected).sum())
            assert error < 2 * max(entry.error for entry in report.outputs) + 1e-3
            assert np.abs(actual[value.name] - peer).max() < 0.1 * np.ptp(expected) + 1e-6


def test_excluded_matmuls_stay_floats(tmp_path: Path) -> None:
    model = onnx.load(SAMPLE / "model.onnx")
    for number, node in enumerate(model.graph.node):  # the samples lack names
        node.name = f"node_{number}"
    onnx.save(model, tmp_path / "named.onnx")
    names = [node.name for node in model.graph.node if node.op_type in ("MatMul", "Gemm")]
    every = quantize(tmp_path / "named.onnx", tmp_path / "a.onnx")
    fewer = quantize(tmp_path / "named.onnx", tmp_path / "b.onnx", exclude=names[:2])
    assert every.quantized - fewer.quantized == 2
    with raises("quantize.node_unknown"):
        quantize(tmp_path / "named.onnx", tmp_path / "c.onnx", exclude=["nothing"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx", "named.onnx"]


@pytest.mark.parametrize("form", ["static", "dynamic"])
def test_nodes_without_names_are_excluded_by_their_outputs(form: Literal["static", "dynamic"], tmp_path: Path) -> None:
    """As the report calls them; `--exclude ""` is an error, and excludes nothing."""
    model = onnx.load(SAMPLE / "model.onnx")
    assert not any(node.name for node in model.graph.node)
    all_calls = calls()
    every = quantize(SAMPLE / "model.onnx", tmp_path / "a.onnx", all_calls, form)
    worst = every.nodes[0]
    assert worst.node == worst.tensor
    fewer = quantize(SAMPLE / "model.onnx", tmp_path / "b.onnx", all_calls, form, exclude=[worst.node])
    assert every.quantized - fewer.quantized == 1
    outputs = {node.output[0] for node in onnx.load(tmp_path / "b.onnx").graph.node if node.op_type == worst.operator}
    assert worst.tensor in outputs
    with raises("quantize.node_unknown"):
        quantize(SAMPLE / "model.onnx", tmp_path / "c.onnx", all_calls, form, exclude=[""])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(SAMPLE.glob("*.npz"))]
    options = [option for path in files for option in ("--calls", path)]
    quantized = tmp_path / "q.onnx"
    command = ["quantize", str(SAMPLE / "model.onnx"), "-o", str(quantized), *options]
    assert main(command) == 0
    assert "matmuls in 8 bits (static)" in capsys.readouterr().out and quantized.is_file()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["error"] > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-o", "nowhere/q.onnx"], "[quantize.folder_missing]"),
        (["-o", "q.onnx", "--calls", "nothing.npz"], "nothing.npz: it cannot be read"),
        (["-o", "model.onnx"], "[quantize.output_is_model]"),
    ],
)
def test_refusals(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes((SAMPLE / "model.onnx").read_bytes())
    assert main(["quantize", "model.onnx", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    with raises("model.invalid_onnx"):
        quantize(tmp_path / "text.onnx", tmp_path / "q.onnx")
