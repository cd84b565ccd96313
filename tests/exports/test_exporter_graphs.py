"""Encoders, parts of multimodal models and of diffusion, as ONNX Runtime's exporter writes them, by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exports.exporter_table import measure, verdict
from tests.exports.mobius_models import COMMITTED_GRAPHS

FOLDER = Path(__file__).parent / "graphs"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", COMMITTED_GRAPHS)
def test_graphs_equal_onnxruntime(name: str) -> None:
    record = measure(FOLDER / f"{name}.onnx")
    assert verdict(record) == "right", record
