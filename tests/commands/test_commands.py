"""All commands share help with examples, JSON, sizes, completion."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from lowering.commands.cli import create_parser, main

MODEL = '<ir_version: 10, opset_import: ["" : 20]> m (float[n, 8] x) => (float[n, 8] y) { [e] y = Exp (x) }'


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in create_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def example_lines(parser: argparse.ArgumentParser) -> list[str]:
    return [line.strip() for line in parser.format_help().splitlines() if line.startswith("  onnx-lowering ")]


@pytest.mark.parametrize("name", ["", *commands()])
def test_help_describes_and_shows(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A description of a sentence or two, and examples that are command lines of that command."""
    parser = commands()[name] if name else create_parser()
    assert parser.description is not None and parser.description.endswith(".")
    assert 60 < len(parser.description) < 300
    lines = example_lines(parser)
    assert lines
    for line in lines:
        _, command, *rest = shlex.split(line)
        assert name in ("", command)
        assert create_parser().parse_args([command, *rest]).command == command
    with pytest.raises(SystemExit) as ended:
        main([*filter(None, [name]), "--help"])
    assert ended.value.code == 0 and lines[0] in capsys.readouterr().out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def artifact(model: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["compile", str(model), "-o", str(model.parent / "out")]) == 0
    capsys.readouterr()
    return model.parent / "out"


def said(capsys: pytest.CaptureFixture[str], *command: object) -> Any:
    """The one document on stdout; not a word on stderr."""
    assert main([*map(str, command), "--json"]) == 0
    out, error = capsys.readouterr()
    assert not error
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_json_of_compile(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = said(capsys, "compile", model, "-o", tmp_path / "out", "--dim", "n=1..4")
    assert report["output"] == str(tmp_path / "out") and report["ranges"] == {"n": [1, 4]}
    assert report["inputs"] == [{"name": "x", "dtype": "float32", "storage": "float32", "dims": ["n", 8]}]
    assert [kernel["source"] for kernel in report["kernels"]] == [""] and report["notes"] == []
    manifest = said(capsys, "inspect", tmp_path / "out")
    assert all(manifest[name] == report[name] for name in ("inputs", "outputs", "target", "donated", "ranges", "notes"))


def test_json_of_run(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.zeros((3, 8), np.float32)
    np.save(tmp_path / "x.npy", x)
    command = ["run", artifact, "--input", f"x={tmp_path}/x.npy"]
    assert said(capsys, *command)["outputs"] == [{"name": "y", "dtype": "float32", "shape": [3, 8], "file": None}]
    (y,) = said(capsys, *command, "--output-dir", tmp_path / "results")["outputs"]
    np.testing.assert_array_equal(np.load(y["file"]), np.exp(x))
    assert main([*map(str, command), "--json", "--threads", "2000"]) == 1
    out, error = capsys.readouterr()
    assert not out and error.endswith("]: threads must be a whole number from 1 to 1024, not 2000.\n")


def test_json_of_package(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = said(capsys, "package", artifact, "--to", tmp_path / "app")
    assert report == {"output": str(tmp_path / "app"), "target": "cpu"} and (tmp_path / "app" / "main.cc").is_file()
    wheel = said(capsys, "package", "--wheel", artifact, "--to", tmp_path / "dist", "--name", "my-model")["output"]
    assert Path(wheel).is_file()


def test_json_of_tune(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", model, "--database", tmp_path / "tuned", "--budget", "0.1s", "--dim", "n=8"]
    report = said(capsys, *command)
    assert Path(report["database"]).parent == tmp_path / "tuned" and report["gain"] == 1 and not report["interrupted"]
    assert {outcome["name"] for outcome in report["outcomes"]} == {"exp"} and report["outcomes"][0]["gain"] == 1


def test_verbose_logs_while_its_command_runs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(model), "-vv"]) == 0
    out, error = capsys.readouterr()
    lines = error.splitlines()
    assert any(line.startswith("reading the model: ") for line in lines) and "pass schedule: " in error
    assert "reading" not in out
    assert main(["verify", str(model), "-v"]) == 0
    fewer = capsys.readouterr().err.splitlines()
    assert any(line.startswith("linking: ") for line in fewer) and len(fewer) < len(lines)
    assert main(["verify", str(model)]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "bench", "tune"])
def test_a_range_where_one_size_is_needed(
    model: Path, artifact: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--database", str(tmp_path / "tuned")] if command == "tune" else []
    assert main([command, str(artifact if command == "bench" else model), "--dim", "n=1..8", *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error[argument.range_unsupported]: ") and "Write --dim n=8." in error
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize("dim", ["n=2", "n=1..8"])
@pytest.mark.parametrize("command", ["compile", "check"])
def test_sizes_that_are_fixed_or_bounded(
    model: Path, tmp_path: Path, command: str, dim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["-o", str(tmp_path / "out")] if command == "compile" else []
    assert main([command, str(model), "--dim", dim, *more]) == 0
    assert main([command, str(model), "--dim", dim, "--dim", "n=3", *more]) == 1
    assert "[argument.dim_repeated]" in capsys.readouterr().err
    assert main([command, str(model), "--dim", dim.replace("n", "m", 1), *more]) == 1
    assert "no input has a symbolic dimension 'm'. There are: n." in capsys.readouterr().err


def test_sizes_are_called_alike_by_all_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the model writes them, whatever the characters; by input and axis where it says nothing of them."""
    names = ["?", "p2o.DynamicDimension.0", "x_0", "a = b"]
    x, y = (onnx.helper.make_tensor_value_info(name, 1, names) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    opset = onnx.helper.make_opsetid("", 20)
    path, out = tmp_path / "m.onnx", tmp_path / "out"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    called = ["x_0_", *names[1:]]
    assert main(["compile", str(path), "-o", str(out)]) == 0
    capsys.readouterr()
    assert said(capsys, "inspect", out)["inputs"][0]["dims"] == called
    assert main(["bench", str(out), "--seconds", "0"]) == 1
    hint = capsys.readouterr().err.rpartition("for instance ")[2].strip().rstrip(".")
    sizes = shlex.split(hint)
    assert sizes[::2] == ["--dim"] * 4 and sorted(sizes[1::2]) == sorted(f"{name}=8" for name in called)
    assert main(["bench", str(out), "--seconds", "0", *sizes]) == 0
    assert main(["verify", str(path), *sizes]) == 0
    assert main(["check", str(path), *sizes]) == 0
    capsys.readouterr()
    fixed = said(capsys, "compile", path, "-o", out, "--dim", "x_0_=2", "--dim", "a = b=1..4")
    assert fixed["inputs"][0]["dims"] == [2, *called[1:]] and fixed["ranges"] == {"x_0_": [2, 2], "a = b": [1, 4]}
    assert main(["compile", str(path), "-o", str(out), "--dim", "?=2"]) == 1
    assert "[dims.name_unspecific]" in capsys.readouterr().err
