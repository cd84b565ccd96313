"""Exported models are right at every size: tiny ones that are committed here, and on request the whole table."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.exports import table
from tests.exports.forms import PARTIAL, Export, Setting, find_exports, published

SAMPLES = Path(__file__).parent / "samples"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("folder", sorted(SAMPLES.iterdir()), ids=lambda folder: folder.name)
def test_sample(folder: Path) -> None:
    outcome = table.measure(folder)
    assert not outcome.reason
    assert outcome.operators and not outcome.slow
    fixed = folder.name.endswith("fixed")  # a mask of fixed sizes may be a constant
    assert len(outcome.errors) == (1 if fixed else 2)
    assert max(outcome.errors) <= table.BAR["float16" if folder.name.endswith("f16") else "float32"]
    assert outcome.attentions and not outcome.unfused and (fixed or outcome.masks == outcome.formulas)


def test_every_export_of_a_folder_is_found(tmp_path: Path) -> None:
    exports = dict(find_exports(SAMPLES))
    assert list(exports) == sorted(folder.name for folder in SAMPLES.iterdir())
    assert all(path.is_file() for path in exports.values())
    gated = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "flan-t5"}
    assert gated == {name.split("-dynamo")[0] for name in exports if name.endswith("batch1") and "past" not in name}
    begun = tmp_path / f"llama{PARTIAL}"
    begun.mkdir()
    (begun / "model.onnx").touch()
    assert not dict(find_exports(tmp_path))


def test_names_and_sizes_of_forms() -> None:
    export = Export("llama", True, 23, form="batch1")
    assert (
        export.name == "llama-past-dynamo23-batch1" and Export("llama", False, 17, traced=True).name == "llama-traced17"
    )
    assert {setting.batch for setting in export.settings()} == {export.seen().batch} == {1}
    names = {export.name: export for export in published()}
    assert names["published-llama-past-dynamo18-symbolic"].settings() == (Setting(1, 1, 512, 0),)
    assert names["published-llama-past-dynamo18-symbolic"].seen().batch > 1
    fixed = names["published-bert-dynamo23-fixed"]
    assert fixed.settings() == (fixed.seen(),) == (Setting(1, 128, 0, 0),)
    assert "published-bert-past-dynamo23-fixed" not in names


def test_a_result_off_by_a_thousandth_is_noticed(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "distilbert-traced17" / "model.onnx", tmp_path)
    inputs, expected = table.load_setting(SAMPLES / "distilbert-traced17" / "0.npz")
    for result in expected.values():
        result.flat[-1] += 1e-3 * np.ptp(result)
    np.savez(tmp_path / "0.npz", **inputs, **{f"={name}": result for name, result in expected.items()})
    outcome = table.measure(tmp_path)
    assert not outcome.reason
    (error,) = outcome.errors
    assert error == pytest.approx(1e-3, rel=0.1)


def test_error_is_relative_to_the_range() -> None:
    assert table.error(np.array([1.0, 3.5]), np.array([1.0, 3.0])) == 0.25
    assert table.error(np.array([3.0, 3.0]), np.array([2.0, 2.0])) == 0.5
    assert table.error(np.array([1.0]), np.array([1.0, 3.0])) == np.inf
    assert table.error(np.array([1.0, np.nan]), np.array([1.0, 3.0])) == np.inf


def test_page_names_what_is_wrong_and_why() -> None:
    def measurement(name: str, errors: list[float], reason: str = "") -> table.Measurement:
        outcome = {
            "operators": {"MatMul": 2},
            "compile_s": 1.5,
            "attentions": 1,
            "unfused": 0,
            "masks": 1,
            "formulas": 1,
        }
        outcome["slow"] = []
        about = {"name": name, "model": name, "past": False, "exporter": "dynamo", "opset": 18, "dtype": "float32"}
        return table.Measurement(**outcome, errors=errors, steps=None, reason=reason, **about)

    measurements = [measurement("c", [1e-6]), measurement("b", [], "no | way"), measurement("a", [2e-4])]
    page = table.page(measurements, ["B2 S5"], 4)
    assert "3 of 4 exports" in page
    assert [line.split("|")[1].strip() for line in page.splitlines() if "dynamo | 18" in line] == ["a", "b", "c"]
    exceptions = page[page.index("## Exceptions") : page.index("## Operators")]
    assert "| a | an output differs by more than the bar |" in exceptions
    assert "| b | no / way |" in exceptions
    assert "| c |" not in exceptions
    assert "MatMul 3" in page


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_export(tmp_path: Path) -> None:
    for package in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(package)
    table.main(["--folder", str(tmp_path), "--page", str(tmp_path / "models.md")])
    assert "## Exceptions\n\nNone." in (tmp_path / "models.md").read_text()
