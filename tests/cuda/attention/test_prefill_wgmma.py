"""Prefill on Hopper: TMA, mbarriers and wgmma under emulation against the float64 reference, at odd sizes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.record.cache_layout import CacheLayout
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from schedules.cuda.attention.attention_tiles import WgmmaTiles
from schedules.cuda.attention.prefill_wgmma import prefill_wgmma
from schedules.cuda.primitives.device import DEVICES
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import CAUSAL, THREE_D, TURNS, Kernels, close, draw, expected, formula, problem
from tests.cuda_emulation.mutations import survivors

GPU = DEVICES["sm_90a"]


BF16 = {"dtype": "bfloat16", "v_dtype": "bfloat16"}
TILES = WgmmaTiles(2, 32, 240, 24, blocks=3)
SPLIT = WgmmaTiles(2, 16, 240, 24, y_apart=True, split=16, blocks=14)
KERNELS = {
    "full": (problem(lse=True), TILES),
    "causal, narrow values": (problem(window=CAUSAL, head_dim=80, v_head_dim=40, **THREE_D), TILES),
    "ragged causal cache": (
        problem(window=Window(right=0, offset="lengths"), lengths=True, layout=CacheLayout("bte"), **BF16, lse=True),
        WgmmaTiles(3, 48, 160, 32, blocks=2),
    ),
    "window, one head of keys": (
        problem(window=Window(3, 90, "past"), **BF16, kv_heads=1, q_heads=3, head_dim=24, v_head_dim=96, scale=-0.2),
        WgmmaTiles(1, 16, 240, 24, stages=3, blocks=1),
    ),
    "bool mask, large heads": (
        problem(mask=Mask("bool", (1, 1, None, None)), head_dim=256, v_head_dim=256, q_heads=2),
        WgmmaTiles(2, 32, 240, 24, ping_pong=False),
    ),
    "padding mask": (problem(mask=Mask("float32", (None, 1, 1, None)), **THREE_D, v_head_dim=136), TILES),
    "added mask, soft cap, sink": (
        problem(mask=Mask("float16", (None, None, None, None), pad=False), softcap=5.0, sink=True, lse=True),
        TILES,
    ),
    "sink, lengths": (problem(sink=True, lengths=True, lse=True, head_dim=8, v_head_dim=8), TILES),
    "formula": (problem(mask=formula(), kv_heads=4), TILES),
    "split": (problem(window=CAUSAL, lse=True, q_heads=16, kv_heads=2), SPLIT),
    "split, lengths, sink": (
        problem(window=Window(70, 0, "lengths"), lengths=True, sink=True, lse=True, **BF16, head_dim=80, v_head_dim=40),
        SPLIT,
    ),
    "split, large heads, mask": (
        problem(mask=Mask("bool", (None, None, None, None)), head_dim=200, v_head_dim=256, kv_heads=4),
        WgmmaTiles(1, 16, 240, 24, ping_pong=False, split=16, blocks=30),
    ),
    "split formula": (problem(mask=formula(), lse=True), SPLIT),
    "default": (problem(window=CAUSAL, q_heads=2), None),
}
SIZES = [(1, 1, 1), (2, 130, 70), (1, 70, 133)]


def kernel(p: AttentionProblem, tiles: WgmmaTiles) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention")
        prefill_wgmma(BoundAttention(p, scope="local"), tiles, GPU)
    return builder.get()


def make_kernel(name: str) -> tirx.PrimFunc:
    p, tiles = KERNELS[name]
    return kernel(p, tiles or WgmmaTiles.default(p, GPU))


kernels = Kernels({name: p for name, (p, _) in KERNELS.items()}, make_kernel, GPU.arch)


@pytest.mark.parametrize("name", KERNELS)
def test_equals_the_reference(name: str) -> None:
    kernels.check(name, SIZES)


@pytest.mark.parametrize("turn", range(len(TURNS)))
def test_whatever_comes_first(turn: int) -> None:
    """Threads in both orders; copies and matmuls as late as possible, at once, and the newest first."""
    p, _ = KERNELS["ragged causal cache"]
    inputs = draw(p, 2, 200, 150)
    close(kernels.call("ragged causal cache", inputs, turn)[0], expected(p, inputs)[0], p)


@pytest.mark.parametrize("name", ["ragged causal cache", "bool mask, large heads", "added mask, soft cap, sink"])
def test_hidden_values_do_not_leak(name: str) -> None:
    """Keys and values of NaN and infinity change only the rows that see them."""
    p, _ = KERNELS[name]
    inputs = draw(p, 2, 100, 150)
    for array, poison in (("k", (np.nan, np.inf)), ("v", (np.inf, np.nan))):
        by_key = inputs[array] if p.layout.axes == "bte" else inputs[array].swapaxes(1, 2)
        by_key[:, 20], by_key[:, 140] = poison
    want, _ = expected(p, inputs)
    got, _ = kernels.call(name, inputs, 0)
    clean = np.isfinite(want)
    assert clean.any() and not clean.all()
    close(got[clean], want[clean], p)
    assert not np.isfinite(got[~clean]).any()


@pytest.mark.no_gpu
@pytest.mark.parametrize("y_apart", (False, True))
def test_every_step_of_synchronization_counts(y_apart: bool) -> None:
    """Omit barriers, waits and fences one by one, over several query tiles, full ones and ones to clean.

    Without turns, which affect speed and not results.
    """
    p = problem(window=CAUSAL, lengths=True, q_heads=1, kv_heads=1, head_dim=16, v_head_dim=16)
    tiles = dataclasses.replace(TILES, kv=16, blocks=1, ping_pong=False, y_apart=y_apart)
    module = emulated.module({"attention": kernel(p, tiles)}, arch=GPU.arch)
    inputs = draw(p, 1, 200, 90)
    inputs["lengths"], inputs["v"][:, :, [5, 60]] = np.array([85]), np.nan
    want, _ = expected(p, inputs)
    clean = np.isfinite(want)
    assert clean.any() and not clean.all()

    def right(after: list[Any]) -> bool:
        return np.allclose(after[-1][clean], want[clean], atol=2e-3) and not np.isfinite(after[-1][~clean]).any()

    arrays = [*(inputs[name] for name in ("q", "k", "v", "lengths")), np.full(want.shape, np.nan, p.dtype)]
    # The wait for V after the softmax keeps ptxas from waiting for O before it. The values are already there.
    left = [step.name for step in survivors(module, "attention", arrays, right)]
    assert left == ["cuda_mbarrier_wait"]


def test_no_keys_and_no_rows() -> None:
    for name in ("full", "ragged causal cache"):
        p, _ = KERNELS[name]
        for batch, q_len, kv_len in [(0, 3, 5), (2, 0, 5), (1, 70, 0)]:
            inputs = draw(p, batch, q_len, kv_len)
            y, lse = kernels.call(name, inputs, 0)
            assert lse is not None
            assert not y.any() and np.array_equal(lse, np.full(lse.shape, -np.inf))


@pytest.mark.no_gpu
def test_default_tiles_are_legal() -> None:
    for dim, v_dim in itertools.product(range(8, 257, 24), range(8, 257, 24)):
        for mask in (None, Mask("bool", (None, None, None, None))):
            p = problem(head_dim=dim, v_head_dim=v_dim, mask=mask)
            WgmmaTiles.default(p, GPU).check(p, GPU)


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("tiles", "why"),
    [
        (WgmmaTiles(4, 64, 104, 24), "consumers = 4 must be 1, 2 or 3"),
        (WgmmaTiles(2, 40, 240, 24), "kv = 40 must be a multiple of 16"),
        (WgmmaTiles(3, 64, 240, 24), "744 registers per thread of each warpgroup must be at most 512"),
        (WgmmaTiles(2, 256, 240, 24, stages=4), "bytes of shared memory must fit 232448"),
        (WgmmaTiles(3, 192, 160, 32), "176 accumulators must fit 160 registers"),
        (WgmmaTiles(2, 64, 236, 24), "must be multiples of 8"),
        (WgmmaTiles(2, 64, 240, 24, stages=1), "stages = 1 must be at least 2"),
    ],
)
def test_illegal_tiles_say_why(tiles: WgmmaTiles, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        tiles.check(problem(), GPU)
