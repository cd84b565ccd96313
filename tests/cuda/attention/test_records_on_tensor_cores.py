"""Random problems with poison on tensor cores, with kernels chosen as for a real call, against the float64
reference. docs/records.md counts the long run (-m slow)."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from schedules.cuda.attention.attention import attention_kernel
from schedules.cuda.attention.attention_tiles import MmaTiles, WgmmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.attention.prefill_mma import can_prefill
from schedules.cuda.primitives.device import DEVICES
from tests import cuda_emulation as emulated
from tests.cases.attention_cases import draw_cases
from tests.cases.record_cases import CALLS, ON_TENSOR_CORES, SMALL_M
from tests.cuda.attention.emulated_records import equals_the_reference

PREFILL = MmaTiles(32, 32, warps=2, split=64)
ON_HOPPER = WgmmaTiles(1, 32, 240, 24, split=64)
SEEDS = range(13)


@functools.cache
def kernels(seeds: range, arch: str) -> emulated.Module:
    functions, gpu = {}, DEVICES[arch]
    for seed in seeds:
        p = draw_cases(seed, CALLS, tensor_cores=True)[0].problem
        assert can_prefill(p)
        prefill = ON_HOPPER if gpu.generation == 90 and p.is_dense else PREFILL
        decode = dataclasses.replace(DecodeTiles.default(p, gpu), blocks=12, split=16, rows=SMALL_M)
        functions[f"attention_{seed}"] = attention_kernel(p, gpu, prefill, decode)
    return emulated.module(functions, arch=arch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(seed: int) -> None:
    equals_the_reference(kernels(range(seed, seed + 1), "sm_80"), seed, tensor_cores=True)


@pytest.mark.no_gpu
def test_the_drawn_problems_are_of_many_kinds() -> None:
    problems = [draw_cases(seed, CALLS, tensor_cores=True)[0].problem for seed in SEEDS]
    assert {p.is_ragged for p in problems} == {False, True}
    assert {p.layout.has_lookup for p in problems} == {False, True}
    assert {type(p.layout.slots).__name__ for p in problems} == {"Whole", "Offset", "Pages"}
    assert {p.mask is None for p in problems} == {False, True}
    assert {p.is_quantized for p in problems} == {False, True}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
@pytest.mark.parametrize("first", ON_TENSOR_CORES[::20])
def test_equals_the_reference_at_length(first: int, arch: str) -> None:
    seeds = range(first, first + 20)
    for seed in seeds:
        equals_the_reference(kernels(seeds, arch), seed, tensor_cores=True)
