"""Attention operators of com.microsoft over pages, beams and quantized caches, on the emulated GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests import cuda_emulation as emulated

TARGET = "cuda:sm_80"
MODULES = ("test_paged_attention", "test_decoder_attention", "test_quantized_caches")


def check(module: str, number: int, calls: int) -> None:
    importlib.import_module(f"tests.ops.microsoft.{module}").check(number, calls, TARGET)


def runs() -> Iterator[Any]:
    """Yield each configuration of a short or a long run."""
    for module in MODULES:
        configurations = importlib.import_module(f"tests.ops.microsoft.{module}").RUNS
        for run in ("CUDA", "CUDA, long"):
            marks = [pytest.mark.slow] if run.endswith("long") else []
            for number in configurations[run][0]:
                yield pytest.param(module, number, configurations[run][1], id=f"{run}, {module} {number}", marks=marks)


@pytest.mark.parametrize(("module", "number", "calls"), runs())
def test_equals_the_reference(module: str, number: int, calls: int) -> None:
    emulated.run(check, module, number, calls, arch="sm_80", timeout=500)
