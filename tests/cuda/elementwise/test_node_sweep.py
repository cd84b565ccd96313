"""Every node case of ONNX that compiles for CPUs compiles for CUDA, and samples give the expected values."""

from __future__ import annotations

import pytest

import lowering
from lowering.ops import list_registered
from tests import cuda_emulation as emulated
from tests.cases import node_cases
from tests.cases.node_cases import Case
from tests.cuda.attention import test_onnx_cases
from tests.cuda.elementwise import node_sweep

# Operators whose kernels are generic loop nests.
LOOP_NESTS = ("Det", "GRU", "GridSample", "LSTM", "MaxUnpool", "NonMaxSuppression", "RNN", "RoiAlign", "ScatterND")


def sample(operator: str) -> Case:
    """Return the case of an operator that uses most of its inputs; of several the smallest."""
    candidates = [case for case in node_cases.cases(operator) if not case.expanded and not node_cases.refusal(case)]
    return max(candidates, key=lambda case: (len(case.inputs), -sum(array.size for array in case.inputs)))


@pytest.mark.parametrize("operator", LOOP_NESTS)
def test_loop_nests_are_right(operator: str) -> None:
    errors = emulated.run(failures, operator, arch="sm_90a", timeout=580)
    assert not errors, "\n".join(errors)


def failures(operator: str) -> list[str]:
    """Return the errors of the sample of an operator, in the emulation's process."""
    return test_onnx_cases.failures_of([sample(operator)], "sm_90a")


def test_fused_kernels_of_empty_arrays_are_right() -> None:
    """The state of a convolution whose kernel has one element is empty."""
    errors = emulated.run(failures_of_empty, "CausalConvWithState", arch="sm_90a", timeout=580)
    assert not errors, "\n".join(errors)


def failures_of_empty(operator: str) -> list[str]:
    """Return the errors of an operator's cases that give an empty array, in the emulation's process."""
    cases = [c for c in node_cases.cases(operator) if not c.expanded and not all(array.size for array in c.outputs)]
    return test_onnx_cases.failures_of(cases, "sm_90a")


@pytest.mark.no_gpu
@pytest.mark.parametrize("operator", ["LSTM", "NonMaxSuppression"])
def test_machine_code_of_loop_nests(operator: str) -> None:
    """nvcc takes them."""
    lowering.compile(sample(operator).model, target=node_sweep.TARGET)


@pytest.mark.no_gpu
def test_operators_are_recorded() -> None:
    """Every operator of the standard with cases that compile for CPUs is in docs/cuda_cases.json."""
    recorded = node_sweep.recorded()
    for domain, operator in list_registered():
        if domain in node_cases.DOMAINS and operator not in recorded:
            cases = node_cases.cases(operator)
            assert all(map(node_cases.refusal, cases)), f"{operator}: run `python -m tests.cuda.elementwise.node_sweep`"


@pytest.mark.no_gpu
@pytest.mark.parametrize("operator", ["Add", "Det", "NonMaxSuppression", "RoiAlign", "TensorScatter"])
def test_record_is_right(operator: str) -> None:
    assert node_sweep.sweep(operator) == node_sweep.recorded()[operator]


@pytest.mark.no_gpu
@pytest.mark.slow
@pytest.mark.parametrize("operator", sorted(node_sweep.recorded()))
def test_record_is_right_of_all(operator: str) -> None:
    assert node_sweep.sweep(operator) == node_sweep.recorded()[operator]
