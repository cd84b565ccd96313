"""Kernels whose code TVM cannot generate: the error names the nodes, and not TVM."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

import lowering
from schedules.cuda.elementwise import loop_nests
from tests.support.error_codes import raises

pytestmark = pytest.mark.no_gpu

TEXT = """
<ir_version: 10, opset_import: ["" : 22]>
m (float[2, 3, 3] x) => (float[2] y) { e = Exp (x)  [of_matrices] d = Det (e)  y = Neg (d) }
"""


def test_error_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_arrays(body: Any, threads: Any, thread: Any) -> tuple[Any, list[Any]]:
        return body, []

    model = onnx.parser.parse_model(TEXT)
    monkeypatch.setattr(loop_nests, "_place_arrays", leave_arrays)
    with raises("compiler.code_generation_failed") as caught:
        lowering.compile(model, target="cuda:sm_80")
    assert "Check failed" not in str(caught.value)
    assert "global memory" in str(caught.value.__cause__)
