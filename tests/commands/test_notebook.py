"""Results as notebooks and prompts show them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import lowering
from lowering.tuning.search.session import TuningOutcome

ODD = "x<b>&\"'"


def model(operator: str = "Exp") -> onnx.ModelProto:
    """An input whose name is markup, a dimension called n."""
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["n", 8]) for name in (ODD, "y"))
    node = onnx.helper.make_node(
        operator, [ODD], ["y"], f"node {ODD}", domain="" if operator == "Exp" else "com.example"
    )
    graph = onnx.helper.make_graph([node], "g", [x], [y])
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.example", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def shown(result: Any) -> tuple[str, list[list[str]]]:
    """Return the text above the table of a notebook's view, and the table's cells; illegal markup raises."""
    tree = ElementTree.fromstring(f"<div>{result._repr_html_().replace('<br>', '<br/>')}</div>")
    rows = [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]
    assert len({len(row) for row in rows}) == 1
    (text,) = tree.iter("p")
    return "\n".join(text.itertext()), rows


@pytest.fixture(scope="module")
def compiled() -> lowering.Model:
    return lowering.compile(model(), dims={"n": (1, 64)})


def test_a_model(compiled: lowering.Model) -> None:
    text, rows = shown(compiled)
    assert "model for cpu, 1 kernels" in text and "n: 1 to 64" in text
    assert rows[1:] == [["input", ODD, "float32", "['n', 8]", ""], ["output", "y", "float32", "['n', 8]", ""]]
    assert repr(compiled) == f"Model({ODD}: float32[n, 8] -> y: float32[n, 8])"


def test_a_profile(compiled: lowering.Model) -> None:
    profile = lowering.bench(compiled, {"n": 4}, seconds=0)
    text, rows = shown(profile)
    assert (
        "a run" in text
        and "n=4" in text
        and [row[:3] for row in rows]
        == [
            ["kernel", "schedule", "calls"],
            ["exp", "elementwise", "1"],
        ]
    )
    assert repr(profile).startswith("Profile(") and " a run (" in repr(profile) and "\n" not in repr(profile)


def test_a_verification() -> None:
    right = lowering.verify(model(), inputs={ODD: np.zeros((2, 8), np.float32)})
    text, rows = shown(right)
    assert text == "allowed: of each element 1e-05 and 0.001 of itself" and rows[1][0] == "y" and rows[1][-1] == "ok"
    assert repr(right) == f"Verification(all outputs agree; {text})"
    wrong = lowering.verify(model(), sizes={"n": 99}, rtol=0.0, atol=0.0)
    assert shown(wrong)[1][1][-1] == "DIFFERS" and "first output that differs: y;" in repr(wrong)


def test_a_report() -> None:
    report = lowering.check(model("Frobnicate"))
    text, rows = shown(report)
    assert text == "1 nodes, 1 cannot be lowered" and repr(report) == f"Report({text})"
    assert ODD in rows[1][0] and str(report).splitlines()[-1] == text


def test_a_tuning() -> None:
    outcomes = (
        TuningOutcome("exp", "tiles", (ODD,), 0.5, 2e-3, 1e-3, 16, {"wrong": 2}, "{}", in_model=0.625),
        TuningOutcome("relu", "", ("r",), 0.1, 1.0, 1.0, 0, {}, "", why="it <is> nothing"),
    )
    tuning = lowering.Tuning(Path("tuned/here"), outcomes, 61.0, 61.5, "time", 1.25)
    text, rows = shown(tuning)
    summary = "1 of 2 kernels got faster, a run 1.33x by their shares, measured 1.25x; took 1:01 of 1:01"
    assert text.splitlines() == [summary, "records: tuned/here", "not tuned: relu: it <is> nothing"]
    expected = ["exp", ODD, "50.0%", "16", "2 ms", "1 ms", "2.00x", "1.60x", "tiles", "2 wrong"]
    assert rows[1:] == [expected] and len(rows[0]) == len(expected)
    assert repr(tuning) == f"Tuning({summary}; records: tuned/here)"
