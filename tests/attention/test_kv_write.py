"""KvWrite writes new rows to their slots and nothing else, for any cache, quantization, and numbers in tables."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from lowering.attention.kv_write import copy_and_write, write_in_place
from lowering.passes.tvm_workarounds.guard_divisions import guard_divisions
from tests.cases.attention_cases import TARGET
from tests.cases.kv_write_cases import Case, are_equal, arrays, draw_cases, expected
from tests.support.placed_arrays import borrow, guarded

CALLS = 6


def check(seed: int) -> None:
    cases = draw_cases(seed, CALLS)
    record = cases[0].record
    functions = {"in_place": write_in_place(record), "copying": copy_and_write(record)}
    module = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in functions.items()})
    built = tvm.compile(guard_divisions(module), TARGET)
    for number, case in enumerate(cases):
        inputs = arrays(case)
        want = expected(case, inputs)
        copies = {name: guarded(array, at_end=number % 2 == 0) for name, array in inputs.items()}
        results = {name: guarded(np.zeros_like(inputs[name]), number % 2 == 1) for name in record.caches()}
        built["copying"](*(borrow(x) for x in copies.values()), *(borrow(x) for x in results.values()))
        for name, array in inputs.items():
            assert copies[name].tobytes() == array.tobytes(), f"{name} was written: {case}"
        compare(case, results, want)
        built["in_place"](*(borrow(x) for x in copies.values()))
        compare(case, copies, want)


def compare(case: Case, actual: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, array in want.items():
        assert are_equal(case, actual[name], array), f"{name}: {case}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 16, 8))
def test_writes_new_rows_and_nothing_else(first: int) -> None:
    for seed in range(first, first + 8):
        print(f"seed {seed}")
        check(seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_writes_new_rows_at_length(first: int) -> None:
    for seed in range(first, first + 20):
        print(f"seed {seed}")
        check(seed)
