"""The serving operators on the emulated GPU: caches bit for bit, attention against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests import cuda_emulation as emulated

TARGET = "cuda:sm_80"


def openppl(run: str, operator: str, number: int) -> None:
    from tests.serving.cache_attention import cache_attention_cases, test_cache_attention
    from tests.serving.coverage_of_serving import PPL

    seed, _, calls = PPL[run]
    case = cache_attention_cases.cases(seed, number + 1, operator)[number]
    test_cache_attention.check(case, number, calls, TARGET)


def tensorrt_llm(run: str, number: int) -> None:
    from tests.serving.coverage_of_serving import GPT
    from tests.serving.gpt_attention import gpt_attention_cases, test_gpt_attention

    seed, _, calls = GPT[run]
    case = next(itertools.islice(gpt_attention_cases.cases(seed, number + 1), number, None))
    rng = np.random.default_rng(number)
    for _ in range(calls):
        test_gpt_attention.check(case, rng, TARGET)


def runs() -> Iterator[Any]:
    """Each configuration of a short or a long run: function and its arguments."""
    from tests.serving.cache_attention.cache_attention_cases import INPUTS
    from tests.serving.coverage_of_serving import GPT, PPL

    for run in ("CUDA", "CUDA, long"):
        marks = [pytest.mark.slow] if run.endswith("long") else []
        for operator in INPUTS:
            for number in range(PPL[run][1]):
                yield pytest.param(openppl, (run, operator, number), id=f"{run}, {operator} {number}", marks=marks)
        for number in range(GPT[run][1]):
            yield pytest.param(tensorrt_llm, (run, number), id=f"{run}, gpt_attention {number}", marks=marks)


@pytest.mark.parametrize(("function", "arguments"), runs())
def test_equals_the_reference(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    emulated.run(function, *arguments, arch="sm_80", timeout=500)
