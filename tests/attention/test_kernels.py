"""Every kernel of an attention problem equals the float64 reference: random problems, sizes, masks and poison.

A short run draws few cases, the long one (-m slow) those that docs/records.md counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import tvm

import schedules
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.record.problem import AttentionProblem
from tests.cases.attention_cases import TARGET, Case, arrays, check, draw_cases, run
from tests.cases.record_cases import ON_CPU, PAGE, page

Make = Callable[[AttentionProblem], tvm.IRModule]
CALLS = 5  # of every problem that is compiled
FOUND = {
    27: "an index that goes down, divided",
    1101: "a mask in bfloat16 whose last dimension may be 1",
    1567: "NaN in another row's mask",
    49507: "a bfloat16 mask that sequences start in, of no columns",
    1519491422: "a mask of no columns, and keys that it would not have",
}


def plain_module(problem: AttentionProblem) -> tvm.IRModule:
    return tvm.IRModule({"attention": build_plain_attention(problem)})


def scheduled_module(problem: AttentionProblem) -> tvm.IRModule:
    return schedules.apply_schedules(plain_module(problem), TARGET)


def sweep(make: Make, seeds: Iterable[int]) -> None:
    for seed in seeds:
        for case in draw_cases(seed, CALLS):
            inputs = arrays(case)
            try:
                check(case, inputs, run(case, inputs, make))
            except Exception:
                print(f"seed {seed}: {case}")
                raise


@pytest.mark.parametrize(("make", "seeds"), [(plain_module, range(36)), (scheduled_module, range(5))])
def test_equals_the_reference(make: Make, seeds: range) -> None:
    sweep(make, seeds)


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_found_once_stays_right(seed: int) -> None:
    sweep(scheduled_module, [seed])


@pytest.mark.parametrize("make", [plain_module, scheduled_module])
@pytest.mark.parametrize("q_len", [1, 40])
def test_a_row_whose_scores_are_all_minus_infinity_gives_0(make: Make, q_len: int) -> None:
    """As where float16 scores overflow: the standard's evaluator gives 0 too."""
    types = {"dtype": "float32", "v_dtype": "float32", "acc_dtype": "float32"}
    problem = AttentionProblem(1, q_len, 24, 2, 1, 16, 16, **types, scale=1.0)
    case = Case(problem, 1, q_len, 24, 24, 0, 0, False)
    inputs = arrays(case) | {"q": np.ones((1, 2, q_len, 16), np.float32)}
    inputs["k"] = np.full((1, 1, 24, 16), -np.inf, np.float32)
    assert (run(case, inputs, make)["y"] == 0).all()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", ON_CPU[::20])
@pytest.mark.parametrize("make", [plain_module, scheduled_module])
def test_equals_the_reference_at_length(make: Make, first: int) -> None:
    sweep(make, range(first, first + 20))


def test_the_page_of_records_is_generated_anew() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.cases.record_cases`"
