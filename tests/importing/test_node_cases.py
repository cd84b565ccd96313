"""The ONNX backend node cases, operator by operator: each passes, or is refused and listed in docs/operators.md."""

from __future__ import annotations

import dataclasses
import traceback

import numpy as np
import pytest

from tests.cases import node_cases
from tests.cases.node_cases import EVERY_TYPE, Case

# Attention has by far the most cases: they are divided among the workers.
PARTS = 8


def failures(cases: list[Case], may_be_refused: bool) -> list[str]:
    """Return the failures, case by case."""
    texts = []
    for case in cases:
        try:
            if not (may_be_refused and node_cases.refusal(case)):
                node_cases.run(case)
        except Exception:
            texts.append(f"{case.name}: {traceback.format_exc(limit=3)}")
    return texts


ORDINARY = [o for o in node_cases.operators() if o not in EVERY_TYPE]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("operator", ORDINARY)
def test_operator(operator: str) -> None:
    """Refused cases are those of docs/operators.md, which another test compares with the compiler's refusals."""
    cases = [case for case in node_cases.cases(operator) if not case.expanded]
    assert cases, "onnx has no case of this operator"
    errors = failures(cases, may_be_refused=True)
    assert not errors, "\n".join(errors)


@pytest.mark.slow
@pytest.mark.parametrize("operator", [o for o in ORDINARY if o in node_cases.expandable()])
def test_expanded_operator(operator: str) -> None:
    """The same operator, expanded into operators that have cases of their own."""
    cases = [case for case in node_cases.cases(operator) if case.expanded]
    assert cases
    errors = failures(cases, may_be_refused=True)
    assert not errors, "\n".join(errors)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("index", range(PARTS))
@pytest.mark.parametrize("operator", EVERY_TYPE)
def test_operator_on_every_type(operator: str, index: int) -> None:
    cases = [case for case in node_cases.cases(operator) if not case.expanded]
    assert cases
    errors = failures(cases[index::PARTS], may_be_refused=False)
    assert not errors, "\n".join(errors)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("index", range(PARTS))
@pytest.mark.parametrize("operator", ["Attention", "FlexAttention"])
def test_expanded_operator_on_every_type(operator: str, index: int) -> None:
    cases = [case for case in node_cases.cases(operator) if case.expanded]
    assert cases
    errors = failures(cases[index::PARTS], may_be_refused=False)
    assert not errors, "\n".join(errors)


def test_a_wrong_answer_fails() -> None:
    """The harness itself: other values, another type or another shape are found."""
    case = node_cases.cases("Relu")[0]
    (right,) = case.outputs
    for wrong in (right + 1, right.astype(np.float64), right[:1]):
        with pytest.raises(AssertionError):
            node_cases.run(dataclasses.replace(case, outputs=(wrong,)))
