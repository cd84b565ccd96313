"""Machine code of attention: no registers in memory, no matmul more than tiles need, none waited for by itself."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from lowering.attention.record.problem import AttentionProblem, Mask, Window
from schedules.cuda.attention.attention_tiles import MmaTiles
from tests.cuda.attention.prefill_cases import formula
from tests.cuda.audits.loop_model import count_overlapped_exponentials
from tests.cuda.audits.machine_code import HEAD_DIMS, decode_alone, machine_code, matmuls, prefill, problem

pytestmark = pytest.mark.no_gpu

QUICK = [("sm_80", 64, True), ("sm_80", 128, False), ("sm_90a", 128, False), ("sm_90a", 256, True)]
ALL = [(arch, *case) for arch in ("sm_80", "sm_86", "sm_90a") for case in itertools.product(HEAD_DIMS, (False, True))]


def check(arch: str, p: AttentionProblem) -> None:
    func, tiles = prefill(p, arch)
    code = machine_code(func, arch)
    assert (code.spills, code.stack) == (0, 0)
    assert code.registers * tiles.threads <= 65536 and not code.said
    if isinstance(tiles, MmaTiles):
        assert code.loop["HMMA"] == matmuls(p, tiles)
        return
    assert code.whole["HGMMA"] % matmuls(p, tiles) == 0
    assert code.whole["WARPGROUP"] < code.whole["HGMMA"] / 2, "wgmma is serialized"
    assert count_overlapped_exponentials(code.steps) >= tiles.kv / 2, "no exponential overlaps the matmuls of P V"
    assert code.whole["UTMALDG"] and code.whole["UTMASTG"], "tiles do not come and go by TMA"
    assert code.loop["HGMMA"] == matmuls(p, tiles)


@pytest.mark.parametrize(("arch", "head_dim", "causal"), QUICK)
def test_nothing_is_spilled(arch: str, head_dim: int, causal: bool) -> None:
    check(arch, problem(head_dim, causal))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim", "causal"), ALL)
def test_nothing_is_spilled_by_any_default(arch: str, head_dim: int, causal: bool) -> None:
    check(arch, problem(head_dim, causal))


VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"window": Window(127, 0, "past")},
    "sink": {"window": Window(right=0, offset="past"), "sink": True},
    "lse": {"lse": True},
    "float mask": {"mask": Mask("float16", (None, None, None, None))},
    "float32 mask": {"mask": Mask("float32", (None, None, None, None))},
    "bool mask": {"mask": Mask("bool", (None, 1, None, None))},
    "soft cap": {"softcap": 30.0},
    "formula": {"mask": formula()},
    "formula under a cap": {"mask": formula(), "softcap": 20.0},
}
TENSORS = ("float32 mask", "float mask", "bool mask")
EVERY = [(arch, *case) for arch in ("sm_80", "sm_86", "sm_90a") for case in itertools.product(HEAD_DIMS, VARIANTS)]


@pytest.mark.sampled(31)
@pytest.mark.parametrize(("arch", "head_dim", "variant"), EVERY)
def test_variants(arch: str, head_dim: int, variant: str) -> None:
    """The default tiles of any problem leave the registers that it takes."""
    p = dataclasses.replace(problem(head_dim, False), **VARIANTS[variant])
    check(arch, p)


RECENT = [(arch, *case) for arch in ("sm_100", "sm_120")
          for case in itertools.product(HEAD_DIMS, (False, True), ("nothing", *VARIANTS))]  # fmt: skip


@pytest.mark.sampled(61)
@pytest.mark.parametrize(("arch", "head_dim", "causal", "variant"), RECENT)
def test_loops_spill_nothing(arch: str, head_dim: int, causal: bool, variant: str) -> None:
    """From sm_100 on, ptxas reserves registers for other warps, and stores a few numbers around the loop in memory,
    whatever the tiles."""
    p = dataclasses.replace(problem(head_dim, causal), **VARIANTS.get(variant, {}))
    func, tiles = prefill(p, arch)
    code = machine_code(func, arch)
    assert code.spills_in_loops == 0 and code.spills <= 24 and code.stack <= 64
    assert code.registers * tiles.threads <= 65536 and not code.said


MASKED = [(arch, *case) for arch in ("sm_80", "sm_90a") for case in itertools.product((128, 64, 256), TENSORS)]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("arch", "head_dim", "variant"), MASKED)
def test_decoding_under_a_mask(arch: str, head_dim: int, variant: str) -> None:
    code = machine_code(decode_alone(dataclasses.replace(problem(head_dim, False), **VARIANTS[variant]), arch), arch)
    assert (code.spills, code.stack, code.said) == (0, 0, "")
