"""A misspelt name of a model: found before the compiler is imported, with names like it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lowering
from lowering.graph.loading.model_file import check_model_file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("model.onnx", "decoder.onnx", "models/bert-base.onnx", "models/bert-large.onnx", "model.pt", "readme"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "model2.onnx").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


MISSPELT = {
    "mdoel.onnx": " Did you mean model.onnx?",
    "model": " Did you mean model.onnx?",
    "decodr.onnx": " Did you mean decoder.onnx?",
    "models/bert_base.onnx": " Did you mean models/bert-base.onnx or models/bert-large.onnx?",
    "models/bert.onnx": " Did you mean models/bert-base.onnx?",
    "modles/bert-base.onnx": " Did you mean models/bert-base.onnx?",
    "modles/gone.onnx": "",
    "readme.onnx": "",
    "x": "",
    "nowhere/at/all.onnx": "",
    "a\0b.onnx": "",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_names_that_are_like_it(name: str, folder: Path) -> None:
    with pytest.raises(lowering.ModelError) as error:
        check_model_file(Path(name))
    assert str(error.value) == f"There is no file {name}.{MISSPELT[name]}"
    if "\0" not in name:
        with pytest.raises(lowering.ModelError) as error:
            check_model_file(folder / name)
        assert str(error.value).startswith(f"There is no file {folder / name}.")
        assert str(error.value).count(str(folder)) == 1 + MISSPELT[name].count(".onnx")


@pytest.mark.parametrize(
    "command", ["check", "compile -o out", "verify", "tune --database t --budget 1m", "quantize -o q"]
)
def test_before_the_compiler_is_imported(command: str, folder: Path) -> None:
    code = "import sys; sys.modules['tvm'] = None; from lowering.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    first, *options = command.split()
    done = subprocess.run([sys.executable, "-c", code, first, "mdoel.onnx", *options], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr == "error[model.file_missing]: There is no file mdoel.onnx. Did you mean model.onnx?\n"


def test_from_python_before_the_compiler_is_imported(folder: Path) -> None:
    code = "import sys; sys.modules['tvm'] = None; import lowering; lowering.compile('decoder')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith("ModelError: There is no file decoder. Did you mean decoder.onnx?\n")
