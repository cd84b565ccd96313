"""ONNX's own cases of Attention and TensorScatter, and on request of all other operators, as whole artifacts on an
emulated GPU.

Cases of one opset are parts of one model, so that their kernels are compiled together. Those that the standard expands
to simpler operators are many kernels of TVM's: they run on request (`-m slow`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.compose
import pytest

import lowering
from tests import cuda_emulation as emulated
from tests.cases import node_cases
from tests.cases.node_cases import Case

# Cases in one model.
_PART = 24


def batches(operator: str, expanded: bool) -> Iterator[list[Case]]:
    """Yield the cases of an operator, as it is or expanded, those of one opset at a time."""
    by_opset: dict[tuple, list[Case]] = {}
    for case in node_cases.cases(operator):
        if ("_expanded" in case.name) != expanded:
            continue
        opsets = tuple(sorted((i.domain, i.version) for i in case.model.opset_import))
        by_opset.setdefault(opsets, []).append(case)
    for cases in by_opset.values():
        for start in range(0, len(cases), _PART):
            yield cases[start : start + _PART]


def list_batches() -> list[Any]:
    """Return operator, whether expanded, the number of a batch of its cases, and architecture."""
    return [
        pytest.param(operator, expanded, k, arch, marks=pytest.mark.slow if expanded or arch != "sm_80" else ())
        for operator in node_cases.EVERY_TYPE
        for expanded in (False, True)
        for k in range(len(list(batches(operator, expanded))))
        for arch in ("sm_80", "sm_90a")
        if arch == "sm_80" or not expanded
    ]


def merged(cases: Sequence[Case]) -> onnx.ModelProto:
    """Merge cases into one model: the names of case k begin with `k.`."""
    models = [onnx.compose.add_prefix(case.model, f"{k}.") for k, case in enumerate(cases)]
    whole = onnx.ModelProto()
    whole.CopyFrom(models[0])
    for model in models[1:]:
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(whole.graph, field).extend(getattr(model.graph, field))
    return whole


def failures(operator: str, expanded: bool, batch: int, arch: str) -> list[str]:
    """Return the errors of a batch, in the emulation's process."""
    return failures_of(list(batches(operator, expanded))[batch], arch)


def failures_of(cases: list[Case], arch: str) -> list[str]:
    """Return the cases of one opset whose outputs are wrong."""
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "artifact"
        whole = merged(cases)
        values = (value for case in cases for value in case.inputs)
        inputs = dict(zip((value.name for value in whole.graph.input), values, strict=True))
        fitting, dims = node_cases.fitted(whole, inputs)
        lowering.compile(fitting, f"cuda:{arch}", dims=dims).save(saved)
        model = lowering.load(saved)
    results = iter(model.run(inputs).items())
    errors = []
    for case in cases:
        for expected in case.outputs:
            name, actual = next(results)
            try:
                case.assert_expected(actual, expected, name)
            except AssertionError as error:
                errors.append(f"{case.name}: {error}")
    return errors


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("operator", "expanded", "batch", "arch"), list_batches())
def test_operator(operator: str, expanded: bool, batch: int, arch: str) -> None:
    errors = emulated.run(failures, operator, expanded, batch, arch, arch=arch, timeout=580)
    assert not errors, "\n".join(errors)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [o for o in node_cases.operators() if o not in node_cases.EVERY_TYPE])
def test_ordinary_operator(operator: str) -> None:
    errors = emulated.run(ordinary_failures, operator, "sm_80", arch="sm_80", timeout=580)
    assert not errors, "\n".join(errors)


def ordinary_failures(operator: str, arch: str) -> list[str]:
    """Return `failures` of all cases of an operator that are not expanded, in the emulation's process."""
    return [
        failure
        for batch in batches(operator, expanded=False)
        if (cases := [case for case in batch if not node_cases.refusal(case)])
        for failure in failures_of(cases, arch)
    ]
