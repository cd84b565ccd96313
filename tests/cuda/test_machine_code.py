"""The machine code of prefill by mma.sync: no registers in memory, and no product more than the tile asks for."""

from __future__ import annotations

import itertools

import pytest
from machine_code import HEAD_DIMS, machine_code, prefill, problem, products

from schedules.cuda.tiles import MmaTiles

QUICK = [(64, True), (96, False), (128, True)]
ALL = [("sm_80", *case) for case in itertools.product(HEAD_DIMS, (False, True))]
ALL += [("sm_86", *case) for case in itertools.product(HEAD_DIMS, (False, True))]


def check(arch: str, head_dim: int, causal: bool) -> None:
    p = problem(head_dim, causal)
    func, tiles = prefill(p, arch)
    assert isinstance(tiles, MmaTiles)
    code = machine_code(func, arch)
    assert (code.spills, code.stack) == (0, 0)
    assert code.registers * tiles.threads <= 65536
    assert code.loop["HMMA"] == products(p, tiles)


@pytest.mark.parametrize(("head_dim", "causal"), QUICK)
def test_nothing_is_spilled(head_dim: int, causal: bool) -> None:
    check("sm_80", head_dim, causal)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "head_dim", "causal"), ALL)
def test_nothing_is_spilled_by_any_default(arch: str, head_dim: int, causal: bool) -> None:
    check(arch, head_dim, causal)
