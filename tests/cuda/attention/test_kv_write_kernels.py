"""KvWrite on GPUs: new rows go to their slots and nothing else is written, for any contents of tables."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
import tvm

from lowering.attention.kv_write import write_in_place
from schedules.cuda.cache.kv_write import kv_write
from tests import cuda_emulation as emulated
from tests.cases.kv_write_cases import are_equal, arrays, draw_cases, expected

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
SEEDS, CALLS = range(12), 4


@functools.cache
def kernels() -> emulated.Module:
    functions = {}
    for seed in SEEDS:
        variants = kv_write(write_in_place(draw_cases(seed, CALLS)[0].record), TARGET)
        assert variants
        functions[f"append_{seed}"] = variants[0].make()
    return emulated.module(functions, arch="sm_80")


@pytest.mark.parametrize("seed", SEEDS)
def test_writes_new_rows_and_nothing_else(seed: int) -> None:
    print(f"seed {seed}")
    for case in draw_cases(seed, CALLS):
        inputs = arrays(case)
        want = expected(case, inputs)
        # compiled code takes float8 as bytes
        passed = [x.view(np.uint8) if x.dtype == ml_dtypes.float8_e4m3fn else x for x in inputs.values()]
        for order in ("ascending", "descending"):
            results = dict(zip(inputs, kernels().call(f"append_{seed}", passed, order=order)))
            for name, array in inputs.items():
                result = results[name].view(array.dtype)
                fine = are_equal(case, result, want[name]) if name in want else result.tobytes() == array.tobytes()
                assert fine, f"{name}: {case}"
