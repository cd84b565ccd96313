"""The kernels for every problem, a warp per query row or slice of one: random problems with poison against the
float64 reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from lowering.attention.record.formula import Formula
from lowering.attention.record.problem import Mask
from schedules.cuda.attention.attention import rows_kernel
from schedules.cuda.attention.decode_tiles import RowTiles
from tests import cuda_emulation as emulated
from tests.cases.attention_cases import draw_cases
from tests.cases.record_cases import CALLS, ON_CUDA
from tests.cuda.attention.emulated_records import equals_the_reference

TILES = RowTiles(warps=90, split=2)
SEEDS = range(19)


@functools.cache
def kernels(seeds: range) -> emulated.Module:
    functions = {f"attention_{seed}": rows_kernel(draw_cases(seed, CALLS)[0].problem, TILES) for seed in seeds}
    return emulated.module(functions, arch="sm_80")


@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(seed: int) -> None:
    equals_the_reference(kernels(SEEDS), seed, tensor_cores=False)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", ON_CUDA[::20])
def test_equals_the_reference_at_length(first: int) -> None:
    for seed in range(first, first + 20):
        equals_the_reference(kernels(range(first, first + 20)), seed, tensor_cores=False)


@pytest.mark.no_gpu
def test_the_drawn_problems_are_of_many_kinds() -> None:
    problems = [draw_cases(seed, CALLS)[0].problem for seed in SEEDS]
    rows = {
        case.batch * case.problem.q_heads * case.q_len
        for seed in SEEDS
        for case in draw_cases(seed, CALLS)
        if case.problem.qk_mode is None and case.kv_len > 2 * TILES.split
    }
    assert min(rows - {0}) * 5 < TILES.warps < max(rows)
    assert {p.acc_dtype for p in problems} == {"float32", "float64"}
    assert {p.dtype for p in problems} == {"float32", "float16", "bfloat16", "float64"}
    assert None in {p.qk_mode for p in problems} and len({p.qk_mode for p in problems}) > 2
    assert {type(p.mask) for p in problems} == {type(None), Mask, Formula}
    assert {p.lse for p in problems} == {False, True}
    assert np.any([p.head_dim > 32 and p.head_dim % 32 for p in problems])
