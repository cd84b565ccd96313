"""Linear attention on GPUs: the kernel under emulation against float64, for states of every form."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import tvm

from lowering.attention.linear import LinearAttention, build_linear_attention, in_place
from schedules.cuda.attention.linear import linear
from tests import cuda_emulation as emulated
from tests.cases.linear_cases import RULES, LinearCase, differences

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
SEEDS = range(6)
PACKED = (2, 3)


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
        variants = linear(in_place(build_linear_attention(drawn(seed)[1])), TARGET)
        assert variants
        functions[f"linear_{seed}"] = variants[0].make()
    for seed in PACKED:
        variants = linear(in_place(build_linear_attention(replace(drawn(seed)[1], packed=True))), TARGET)
        assert variants
        functions[f"packed_{seed}"] = variants[0].make()
    return emulated.module(functions, arch="sm_80")


@pytest.mark.parametrize("seed", SEEDS)
def test_state_and_outputs(kernels: emulated.Module, seed: int) -> None:
    case, record = drawn(seed)
    print(f"seed {seed}: {case}")
    for length, order in ((1, "ascending"), (6, "descending")):
        feeds = case.feeds(length, seed)
        y = np.full((case.batch, length, case.y_heads * case.v_head_dim), np.nan, feeds["q"].dtype)
        results = kernels.call(f"linear_{seed}", [*(feeds[name] for name in record.inputs()), y], order=order)
        assert not differences(case, {"present": results[0], "y": results[-1]}, feeds)


@pytest.mark.parametrize("seed", PACKED)
def test_packed_sequences(kernels: emulated.Module, seed: int) -> None:
    """Draw a long sequence with a state, one without rows, a new one with a used page, and one without a page."""
    case, record = drawn(seed)
    print(f"seed {seed}: {case}")
    case, record = replace(case, batch=1), replace(record, packed=True)
    rows = {name: x for name, x in case.feeds(9, seed).items() if name != "state"}
    state = np.full((5, *case.feeds(1, seed)["state"].shape[1:]), np.nan, case.state_dtype)
    state[4] = case.feeds(1, seed)["state"][0]
    tables = {
        "first_rows": [0, 5, 5, 7],
        "row_counts": [5, 0, 2, 2],
        "past": [3, 9, 0, 1],
        "pages": [[4], [1], [2], [-9]],
    }
    feeds = {**rows, "state": state.copy(), **{name: np.array(table, np.int64) for name, table in tables.items()}}
    y = np.full((1, 9, case.y_heads * case.v_head_dim), np.nan, rows["q"].dtype)
    states, *_, y = kernels.call(f"packed_{seed}", [*(feeds[name] for name in record.inputs()), y])
    for first, count, page, before in ((0, 5, 4, state[4]), (5, 2, 2, np.zeros_like(state[4]))):
        own = {name: x[:, first : first + count] for name, x in rows.items()} | {"state": before[None]}
        assert not differences(case, {"present": states[page][None], "y": y[:, first : first + count]}, own)
    assert np.isnan(states[[0, 1, 3]]).all() and np.isnan(y[:, 7:]).all()
