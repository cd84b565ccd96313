"""Encoders, parts of multimodal models and of diffusion, as ONNX Runtime's exporter writes them, by onnxruntime."""

from __future__ import annotations

from pathlib import Path

import pytest
from exporter_table import measure, verdict
from mobius_models import KEPT_GRAPHS
from sampled import sampled

FOLDER = Path(__file__).parent / "graphs"


@pytest.mark.parametrize("name", sampled(KEPT_GRAPHS, 5))
def test_graphs_equal_onnxruntime(name: str) -> None:
    found = measure(FOLDER / f"{name}.onnx")
    assert verdict(found) == "right", found
