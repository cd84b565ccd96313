"""The machine code of prefill: no registers in memory, no product more than tiles ask for, none waited for alone."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from machine_code import HEAD_DIMS, machine_code, prefill, problem, products
from prefill_cases import formula

from lowering.attention.problem import AttentionProblem
from schedules.cuda.attention_tiles import MmaTiles

QUICK = [("sm_80", 64, True), ("sm_80", 128, False), ("sm_90a", 128, False), ("sm_90a", 256, True)]
ALL = [(arch, *case) for arch in ("sm_80", "sm_86", "sm_90a") for case in itertools.product(HEAD_DIMS, (False, True))]


def check(arch: str, p: AttentionProblem, may_spill: bool = False) -> None:
    func, tiles = prefill(p, arch)
    code = machine_code(func, arch)
    assert may_spill or (code.spills, code.stack) == (0, 0)
    assert code.registers * tiles.threads <= 65536 and not code.said
    if isinstance(tiles, MmaTiles):
        assert code.loop["HMMA"] == products(p, tiles)
        return
    assert code.whole["HGMMA"] % products(p, tiles) == 0
    assert code.whole["WARPGROUP"] < code.whole["HGMMA"] / 2, "wgmma is serialised"
    assert code.beside >= tiles.kv / 2, "no exponential is evaluated beside the products of P V"
    assert code.whole["UTMALDG"] and code.whole["UTMASTG"], "tiles do not come and go by TMA"
    if p.window is None and p.mask is None:
        assert code.loop["HGMMA"] == products(p, tiles)


@pytest.mark.parametrize(("arch", "head_dim", "causal"), QUICK)
def test_nothing_is_spilled(arch: str, head_dim: int, causal: bool) -> None:
    check(arch, problem(head_dim, causal))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim", "causal"), ALL)
def test_nothing_is_spilled_by_any_default(arch: str, head_dim: int, causal: bool) -> None:
    check(arch, problem(head_dim, causal))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_formulas(arch: str, head_dim: int) -> None:
    """Documents, under a cap: mask code that loads what it asks for takes more registers than wgmma leaves."""
    p = dataclasses.replace(problem(head_dim, False), mask=formula(), softcap=20.0)
    check(arch, p, may_spill=arch == "sm_90a")
