"""Prefill by mma.sync and asynchronous copies under emulation against the float64 reference, at odd sizes."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.cache_layout import CacheLayout
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from schedules.cuda.attention.attention_tiles import MmaTiles
from schedules.cuda.attention.prefill_mma import can_prefill, prefill_mma
from schedules.cuda.primitives.device import DEVICES
from tests.cuda.attention.prefill_cases import CAUSAL, THREE_D, TURNS, Kernels, close, draw, expected, formula, problem

GPU = DEVICES["sm_80"]


SMALL = MmaTiles(32, 32, warps=2)
SPLIT = MmaTiles(32, 16, warps=1, split=16)
KERNELS = {
    "full": (problem(lse=True), None),
    "causal, narrow values": (problem(window=CAUSAL, head_dim=80, v_head_dim=40, row_axes="bte"), None),
    "causal, static": (
        problem(batch=2, q_len=130, kv_len=200, window=CAUSAL, lse=True, layout=CacheLayout("bte")),
        SMALL,
    ),
    "ragged causal cache": (
        problem(window=Window(right=0, offset="lengths"), lengths=True, dtype="bfloat16", lse=True, **THREE_D),
        MmaTiles(16, 16, warps=1, stages=2, q_in_registers=True),
    ),
    "window, one head of keys": (
        problem(window=Window(3, 90, "past"), dtype="bfloat16", kv_heads=1, q_heads=3, head_dim=72, scale=-0.2),
        MmaTiles(64, 48, warps=2, stages=3),
    ),
    "bool mask, large heads": (problem(mask=Mask("bool", (1, 1, None, None)), head_dim=256, q_heads=2), None),
    "added mask, large heads": (
        problem(mask=Mask("float32", (None, None, None, None)), head_dim=128, window=CAUSAL, dtype="bfloat16"),
        MmaTiles(64, 64, warps=4, q_in_registers=True),
    ),
    "padding mask": (problem(mask=Mask("float32", (None, 1, 1, None)), v_head_dim=136, **THREE_D), SMALL),
    "mask per row": (problem(mask=Mask("bool", (None, 1, None, 1), pad=False), head_dim=16), SMALL),
    "added mask, soft cap, sink": (
        problem(mask=Mask("float16", (None, None, None, None), pad=False), softcap=5.0, sink=True, lse=True),
        SMALL,
    ),
    "soft cap, lengths, sink": (problem(softcap=30.0, sink=True, lengths=True, lse=True, head_dim=8), SMALL),
    "scale of 0": (problem(scale=0.0, window=CAUSAL, head_dim=24), SMALL),
    "formula": (problem(mask=formula(), kv_heads=4), SMALL),
    "split": (problem(lse=True, window=CAUSAL), SPLIT),
    "split, lengths, window, sink": (
        problem(window=Window(70, 0, "lengths"), lengths=True, sink=True, lse=True, dtype="bfloat16", v_head_dim=72),
        dataclasses.replace(SPLIT, stages=2),
    ),
    "split, added mask": (problem(mask=Mask("float32", (None, None, None, None)), softcap=5.0, sink=True), SPLIT),
    "split formula": (problem(mask=formula(), lse=True), SPLIT),
}
SIZES = [(1, 1, 1), (1, 7, 64), (2, 130, 63), (1, 65, 200)]


def kernel(p: AttentionProblem, tiles: MmaTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        prefill_mma(BoundAttention(p, scope="local"), tiles, GPU)
    return builder.get()


def make_kernel(name: str) -> tirx.PrimFunc:
    p, tiles = KERNELS[name]
    return kernel(p, tiles or MmaTiles.default(p, GPU))


kernels = Kernels({name: p for name, (p, _) in KERNELS.items()}, make_kernel, GPU.arch)


@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_reference(name: str) -> None:
    p, _ = KERNELS[name]
    kernels.check(name, SIZES if p.q_len is None else [(p.batch, p.q_len, p.kv_len)])


@pytest.mark.parametrize("turn", range(len(TURNS)))
def test_whatever_comes_first(turn: int) -> None:
    """Threads in both orders; copies as late as possible, at once, and the newest first."""
    p, _ = KERNELS["ragged causal cache"]
    inputs = draw(p, 2, 70, 90)
    close(kernels.call("ragged causal cache", inputs, turn)[0], expected(p, inputs)[0], p)


@pytest.mark.parametrize("name", ["causal, static", "ragged causal cache", "bool mask, large heads"])
def test_hidden_values_do_not_leak(name: str) -> None:
    """NaN and infinities in keys and values do not change rows that do not see them. The others have them too."""
    p, _ = KERNELS[name]
    inputs = draw(p, 2, p.q_len or 100, p.kv_len or 150)
    for array, poison in (("k", (np.nan,)), ("v", (np.inf, np.nan, -np.inf))):
        by_key = inputs[array] if p.layout.axes == "bte" else inputs[array].swapaxes(1, 2)
        by_key[:, -1] = poison[0]
        for number, value in enumerate(poison):
            by_key[:, 20 + 60 * number, ..., 3 * number : 3 * number + 4] = value
    want, _ = expected(p, inputs)
    got, _ = kernels.call(name, inputs, 0)
    finite = np.isfinite(want)
    assert finite.any() and not finite.all()
    close(got[finite], want[finite], p)
    assert not np.isfinite(got[~finite]).any()


def test_an_infinite_value_is_what_rows_have_that_see_it() -> None:
    p, _ = KERNELS["causal, static"]
    inputs = draw(p, 2, 130, 200)
    inputs["v"][:, 50, 3], inputs["v"][:, 60, 3:5], inputs["v"][:, 70, 64:66] = np.inf, -np.inf, np.nan
    want, _ = expected(p, inputs)
    assert all((want == value).any() for value in (np.inf, -np.inf)) and np.isnan(want).any()
    close(kernels.call("causal, static", inputs, 1)[0], want, p)


def test_no_keys_and_no_rows() -> None:
    for name in ("full", "ragged causal cache"):
        p, _ = KERNELS[name]
        for batch, q_len, kv_len in [(0, 3, 5), (2, 0, 5), (1, 70, 0)]:
            y, lse = kernels.call(name, draw(p, batch, q_len, kv_len), 0)
            assert not y.any() and (lse == -np.inf).all()


@pytest.mark.no_gpu
def test_default_tiles_are_legal() -> None:
    for dim, v_dim, gpu in itertools.product(range(8, 257, 24), range(8, 257, 24), DEVICES.values()):
        for window in (None, CAUSAL):
            p = problem(head_dim=dim, v_head_dim=v_dim, window=window)
            MmaTiles.default(p, gpu).check(p, gpu)


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("tiles", "why"),
    [
        (MmaTiles(128, 64, warps=17), "warps = 17 must be from 1 to 16"),
        (MmaTiles(64, 64, warps=1), "q = 64 must be 16 or 32 times warps = 1"),
        (MmaTiles(64, 40, warps=4), "kv = 40 must be a multiple of 16"),
        (MmaTiles(64, 64, warps=4, stages=0), "stages = 0 must be positive"),
        (MmaTiles(128, 128, warps=4, stages=5), "180224 bytes of shared memory must fit 166912"),
        (MmaTiles(128, 192, warps=4), "256 accumulators must fit 255 registers"),
    ],
)
def test_illegal_tiles_say_why(tiles: MmaTiles, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tiles.check(problem(), GPU)


@pytest.mark.no_gpu
def test_takes_half_precision_in_whole_chunks() -> None:
    assert can_prefill(problem(head_dim=8, v_head_dim=256))
    for no in ({"head_dim": 36}, {"v_head_dim": 264}, {"v_dtype": "float32"}, {"dtype": "float32"}, {"qk_mode": 0}):
        assert not can_prefill(problem(**no))
