"""Ping-pong matmuls on Hopper: consumers have their own tiles, and one writes results while the other multiplies."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from schedules.cuda.matmul.matmul_reader import MatmulShape
from schedules.cuda.matmul.matmul_tiles import WgmmaMatmulTiles
from schedules.cuda.primitives.device import DEVICES
from tests.cuda.attention.prefill_cases import TURNS
from tests.cuda.audits.machine_code import disassembled
from tests.cuda.audits.sass import Function, Instruction, read
from tests.cuda.matmul.test_matmul_on_gpus import AUDITED, Case, check, first_variant, make_module
from tests.cuda_emulation import EmulationError
from tests.cuda_emulation.mutations import survivors

# A ring of three stages takes seven steps along k in two rounds. Then the parity of a fill is that of the first again.
ALONE = WgmmaMatmulTiles(2, 64, 3, 160, 24, swizzle=2, split_steps=100, blocks=2, ping_pong=True)
PAIR = dataclasses.replace(ALONE, blocks=4, cluster=2)
GATE = WgmmaMatmulTiles(2, 128, 3, 160, 24, swizzle=2, split_steps=2, ping_pong=True)
CASES = {
    "clusters, B across": Case(n=72, k=400, tiles=PAIR, epilogue="residual", sizes=({"m": 70}, {"m": 330})),
    "B along k": Case(b_transposed=True, k=400, tiles=ALONE, sizes=({"m": 17}, {"m": 300})),
    "gate, k in parts": Case(m=200, n=64, k=272, batch=2, epilogue="gate", dtype="bfloat16", tiles=GATE, sizes=({},)),
    "ragged": Case(n=37, k=40, b_transposed=True, epilogue="float32", tiles=ALONE, sizes=({"m": 0}, {"m": 333})),
    "batches": Case(
        batch="b", k=136, b_transposed=True, tiles=ALONE, sizes=({"b": 3, "m": 40}, {"b": 5, "m": 65}, {"b": 0, "m": 4})
    ),
    "default tiles": Case(m=4000, n=1096, k=64, b_transposed=True, tiles=None, sizes=({},)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    """Under every order of threads and of asynchronous work; tiles odd and even in number, or only one."""
    case = CASES[name]
    if case.tiles is None:
        assert first_variant(case, "sm_90a").tiles["tiles"].ping_pong
    check(case, make_module(case, "sm_90a"), TURNS if case.tiles else TURNS[:1])


@pytest.mark.no_gpu
@pytest.mark.parametrize("tiles", [pytest.param(ALONE, marks=pytest.mark.slow), PAIR], ids=["alone", "cluster"])
def test_nothing_can_be_left_out(tiles: WgmmaMatmulTiles) -> None:
    """The only exception is the wait after a warp's last rows. Turns cannot: a consumer would take fills too early."""
    case = Case(m=256, n=72, k=400, tiles=tiles)
    arrays, want = case.arrays({})

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1].astype("float64"), want, rtol=2e-3, atol=5e-2, equal_nan=True)

    assert [step.name for step in survivors(make_module(case, "sm_90a"), "main", arrays, right)] == ["cuda_warp_sync"]


WRONG = {
    "slots that wait for both consumers": (r"\(uint\)4\);", "(uint)8);"),
    "slots that wait for no whole consumer": (r"\(uint\)4\);", "(uint)2);"),
    "turns that one consumer gives itself": (r"\(uint\)\(2 - (\w+\[0\])\)", r"(uint)(\1 + 1)"),
    "turns that wait for no other": (r"\(uint\)256\)", "(uint)128)"),
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_turn_is_found(name: str) -> None:
    """The emulator notices it under every order of threads and copies, or the result shows it."""
    case, (was, becomes) = Case(m=256, n=72, k=400, tiles=ALONE), WRONG[name]
    module, (arrays, want) = make_module(case, "sm_90a"), case.arrays({})
    source, count = re.subn(was, becomes, module.source())
    assert count
    wrong = module.with_source(source)
    for order, arrivals in TURNS:
        try:
            got = wrong.call("main", arrays, order=order, arrivals=arrivals)[-1]
        except EmulationError:
            continue
        assert not np.allclose(got.astype("float64"), want, rtol=2e-3, atol=5e-2)


@pytest.mark.no_gpu
def test_machine_code() -> None:
    """A consumer gives its turn away before it waits for the last matmuls and stores; nothing spills."""
    func = first_variant(AUDITED["sm_90a, ping-pong"], "sm_90a").make()
    _, sass, said = disassembled(func, "sm_90a")
    (function,) = (f for f in read(sass) if turns(f))
    whole = Counter(i.opcode for i in function.instructions)
    assert (whole["STL"], whole["LDL"], said) == (0, 0, "")
    assert whole["MEMBAR"] <= 4 and whole["USETMAXREG"] == 2 and whole["UTMALDG"]
    assert [i.modifiers[0] for i in turns(function)] == ["SYNC", "ARV"]
    events = [i for i in function.instructions if i.opcode in ("BAR", "WARPGROUP", "HGMMA", "STS")]
    taken, released = (events.index(i) for i in turns(function))
    first, *_, last = (n for n, i in enumerate(events) if i.opcode == "HGMMA")
    stored = next(n for n, i in enumerate(events) if i.opcode == "STS")
    assert taken < first < last < released < stored
    assert (events[released + 1].modifiers[0], events[released + 1].operands) == ("DEPBAR", "gsb0, 0x0")


def turns(function: Function) -> list[Instruction]:
    """Return the barriers of both consumers."""
    return [i for i in function.instructions if i.opcode == "BAR" and i.operands.endswith("0x100")]


@pytest.mark.no_gpu
@pytest.mark.parametrize("matmuls", (1, 2))
def test_a_short_k_is_multiplied_in_turn(matmuls: int) -> None:
    """By default, and by a tuner's first candidates. Both consumers share a long k: tiles of 64 rows read B twice as
    often as those of 128, which the cache does not sustain."""
    device = DEVICES["sm_90a"]

    def tiles(depth: int | None, rows: int | None = None) -> WgmmaMatmulTiles:
        default = WgmmaMatmulTiles.default(MatmulShape("float16", None, rows, 4096, depth, matmuls), device)
        default.check(MatmulShape("float16", None, rows, 4096, depth, matmuls), device)
        return default

    assert [tiles(depth).ping_pong for depth in (64, 512, 2048, 8192, None)] == [True, True, True, False, False]
    assert not tiles(64, rows=128).ping_pong  # one tile for each SM, or less
    with pytest.raises(ValueError, match="1 consumers must be 2 to take turns"):
        dataclasses.replace(ALONE, consumers=1).check(MatmulShape("float16", None, None, 64, 64, 1), device)
