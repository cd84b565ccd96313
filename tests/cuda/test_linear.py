"""Linear attention on GPUs: the kernel under emulation against float64, for states of every form."""

from __future__ import annotations

import random

import cuda_emulation as emulated
import numpy as np
import pytest
import tvm
from linear_cases import RULES, LinearCase, differences

from lowering.attention.linear import LinearAttention, copying, in_place
from schedules.cuda.linear import linear

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
SEEDS = range(6)


def drawn(seed: int) -> tuple[LinearCase, LinearAttention]:
    rng = random.Random(seed)
    heads = rng.choice([(4, 2, 2), (1, 1, 1), (2, 2, 4), (2, 4, 4)])
    half = seed % 3 == 2
    case = LinearCase(
        rule=RULES[seed % len(RULES)], batch=2, q_heads=heads[0], k_heads=heads[1], v_heads=heads[2],
        head_dim=rng.choice((3, 16, 20)), v_head_dim=rng.choice((5, 16, 24)), by_element=rng.random() < 0.5,
        shared_beta=rng.random() < 0.5, dtype="float16" if half else "float32",
    )  # fmt: skip
    widths = case.widths()
    record = LinearAttention(
        None, None, *heads, case.head_dim, case.v_head_dim, case.dtype, case.state_dtype, case.head_dim**-0.5,
        decay=widths.get("decay", 0) // case.v_heads, betas=widths.get("beta", 0),
    )  # fmt: skip
    return case, record


@pytest.fixture(scope="module")
def kernels() -> emulated.Module:
    functions = {}
    for seed in SEEDS:
        variants = linear(in_place(copying(drawn(seed)[1])), TARGET)
        assert variants
        functions[f"linear_{seed}"] = variants[0].make()
    return emulated.module(functions, arch="sm_80")


@pytest.mark.parametrize("seed", SEEDS)
def test_state_and_outputs(kernels: emulated.Module, seed: int) -> None:
    case, record = drawn(seed)
    print(f"seed {seed}: {case}")
    for length, order in ((1, "ascending"), (6, "descending")):
        given = case.feeds(length, seed)
        y = np.full((case.batch, length, case.y_heads * case.v_head_dim), np.nan, given["q"].dtype)
        results = kernels.call(f"linear_{seed}", [*(given[name] for name in record.inputs()), y], order=order)
        assert not differences(case, {"present": results[0], "y": results[-1]}, given)
