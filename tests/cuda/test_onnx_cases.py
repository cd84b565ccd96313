"""ONNX's own cases of Attention and TensorScatter, and on request of all other operators, as whole artifacts
on an emulated GPU.

Cases of one opset are parts of one model, so that their kernels are compiled together. Those that the standard expands
to simpler operators are many kernels of TVM's: they run on request (`-m slow`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cuda_emulation as emulated
import node_cases
import onnx
import onnx.compose
import pytest
from node_cases import Case

import lowering

# Cases in one model.
_PART = 24


def batches(operator: str, expanded: bool) -> Iterator[list[Case]]:
    """The cases of an operator, as it is or expanded, those of one opset at a time."""
    by_opset: dict[tuple, list[Case]] = {}
    for case in node_cases.cases(operator):
        if ("_expanded" in case.name) != expanded:
            continue
        opsets = tuple(sorted((i.domain, i.version) for i in case.model.opset_import))
        by_opset.setdefault(opsets, []).append(case)
    for cases in by_opset.values():
        for start in range(0, len(cases), _PART):
            yield cases[start : start + _PART]


def parts() -> list[Any]:
    """By operator, whether expanded, the number of one of the models that its cases make, and architecture."""
    return [
        pytest.param(operator, expanded, k, arch, marks=pytest.mark.slow if expanded or arch != "sm_80" else ())
        for operator in node_cases.EVERY_TYPE
        for expanded in (False, True)
        for k in range(len(list(batches(operator, expanded))))
        for arch in ("sm_80", "sm_90a")
        if arch == "sm_80" or not expanded
    ]


def merged(cases: Sequence[Case]) -> onnx.ModelProto:
    """One model of all: the names of case k begin with `k.`."""
    models = [onnx.compose.add_prefix(case.model, f"{k}.") for k, case in enumerate(cases)]
    whole = onnx.ModelProto()
    whole.CopyFrom(models[0])
    for model in models[1:]:
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(whole.graph, field).extend(getattr(model.graph, field))
    return whole


def failures(operator: str, expanded: bool, part: int, arch: str) -> list[str]:
    """What went wrong. Called in the emulation's process."""
    return failures_of(list(batches(operator, expanded))[part], arch)


def failures_of(cases: list[Case], arch: str) -> list[str]:
    """Cases of one opset whose outputs are wrong."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "artifact"
        whole = merged(cases)
        given = (value for case in cases for value in case.inputs)
        inputs = dict(zip((value.name for value in whole.graph.input), given, strict=True))
        fitting, dims = node_cases.fitted(whole, inputs)
        lowering.compile(fitting, f"cuda:{arch}", dims=dims).save(saved)
        model = lowering.load(saved)
    results = iter(model.run(inputs).items())
    found = []
    for case in cases:
        for expected in case.outputs:
            name, actual = next(results)
            try:
                node_cases.assert_close(actual, expected, case.rtol, case.atol, name)
            except AssertionError as error:
                found.append(f"{case.name}: {error}")
    return found


@pytest.mark.parametrize(("operator", "expanded", "part", "arch"), parts())
def test_operator(operator: str, expanded: bool, part: int, arch: str) -> None:
    found = emulated.run(failures, operator, expanded, part, arch, arch=arch, timeout=580)
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [o for o in node_cases.operators() if o not in node_cases.EVERY_TYPE])
def test_ordinary_operator(operator: str) -> None:
    found = emulated.run(ordinary_failures, operator, "sm_80", arch="sm_80", timeout=580)
    assert not found, "\n".join(found)


def ordinary_failures(operator: str, arch: str) -> list[str]:
    """As `failures`, of all cases of an operator that are not written out. Called in the emulation's process."""
    return [
        failure
        for part in batches(operator, expanded=False)
        if (cases := [case for case in part if not node_cases.refusal(case)])
        for failure in failures_of(cases, arch)
    ]
