"""Every example runs, and so do the notebook and the demo."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"

# Needs torch, transformers and a package of model weights, which the test extra leaves out.
WITH_TORCH = {
    "05_sentence_embeddings.py",
    "06_text_generation.py",
    "07_speech_decoder.py",
    "08_continuous_batching.py",
    "09_flex_from_torch.py",
    "10_train_with_flex.py",
}
SHARED = {"exported_llama.py"}


@pytest.mark.parametrize("name", sorted(p.name for p in EXAMPLES.glob("*.py") if p.name not in WITH_TORCH | SHARED))
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(WITH_TORCH))
def test_example_with_torch(name: str) -> None:
    subprocess.run([sys.executable, EXAMPLES / name], check=True)


def test_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowering", "demo", "-o", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    for row in ("compile time", "load time", "prefill", "decode", "cache bytes written per token", "max error"):
        assert row in result.stdout
    assert (tmp_path / "model.onnx").is_file() and (tmp_path / "artifact" / "model.so").is_file()


def test_notebook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every cell runs, and is stored without outputs."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "out" / "model.so").is_file()
