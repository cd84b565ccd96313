"""No barrier, wait or fence of a shipped kernel can be left out unnoticed.

What is there is needed; and what is needed is there, since the whole kernel passes under the emulation.
"""

from __future__ import annotations

from typing import Any

import cuda_emulation as emulated
import numpy as np
import pytest
from cuda_emulation.mutations import survivors

from lowering.attention.cache_layout import CacheLayout, KvQuantization
from lowering.attention.problem import AttentionProblem, Window
from lowering.attention.reference import compute_reference
from schedules.cuda.attention import attention_kernel
from schedules.cuda.attention_tiles import MmaTiles
from schedules.cuda.decode_tiles import DecodeTiles
from schedules.cuda.device import DEVICES

pytestmark = pytest.mark.no_gpu

GPU = DEVICES["sm_80"]
DECODE = DecodeTiles(keys=16, warps=2, stages=3, blocks=2, split=64)
FLOAT8 = KvQuantization("float8_e4m3fn", 0, channels=True)
# By tiles of prefill, query rows, keys before them, and what keys and values are. Every loop goes round often enough to
# need all of its steps; in prefill, the first tile of rows sees no key at all.
KERNELS = {
    "prefill, a stage": (MmaTiles(64, 16, 2), 200, -70, None),
    "prefill, stages": (MmaTiles(64, 16, 2, stages=2), 200, -70, None),
    "prefill, Q in registers": (MmaTiles(32, 16, 2, q_in_registers=True), 200, -70, None),
    "prefill, codes": (MmaTiles(64, 16, 2, stages=2), 200, -70, FLOAT8),
    "decode": (MmaTiles(64, 16, 2), 3, 96, None),
    "decode, codes": (MmaTiles(64, 16, 2), 3, 96, FLOAT8),
}
# Before it stores Y where Q was, prefill waits for all threads and copies, which it has done where Q is in registers or
# multiplied by scales. Decode expands codes for the lanes of a warp, whose races the emulator does not see.
REDUNDANT = {
    "prefill, a stage": [],
    "prefill, stages": [],
    "prefill, Q in registers": ["ptx_cp_async_wait_group_async_wait_group_0", "cuda_cta_sync"],
    "prefill, codes": ["ptx_cp_async_wait_group_async_wait_group_0", "cuda_cta_sync"],
    "decode": [],
    "decode, codes": ["cuda_warp_sync"] * 4,
}


def problem(q_len: int, codec: KvQuantization | None) -> AttentionProblem:
    """Causal, with values that are longer than keys, so that Y does not fit where Q was."""
    sizes: dict[str, Any] = {"batch": 1, "q_len": q_len, "kv_len": None, "q_heads": 2, "kv_heads": 1}
    types: dict[str, Any] = {"dtype": "float16", "v_dtype": "float16", "acc_dtype": "float32"}
    window = Window(right=0, offset="past")
    dims: dict[str, Any] = {"head_dim": 32, "v_head_dim": 64, "scale": 0.2}
    return AttentionProblem(**sizes, **types, **dims, window=window, layout=CacheLayout(quantization=codec))


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_can_be_left_out(name: str) -> None:
    tiles, q_len, past, codec = KERNELS[name]
    p, kv_len, rng = problem(q_len, codec), 140, np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, heads, length, dim)).astype("float16")
        for heads, length, dim in ((2, q_len, 32), (1, kv_len, 32), (1, kv_len, 64))
    )
    v[:, :, past + q_len // 2, 5] = np.inf  # some rows see it, which makes prefill go over their tile again
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "past": past}
    if codec is not None:  # whose infinities are NaN
        given |= {name: given[name].astype(codec.dtype) for name in "kv"}
        given |= {f"{name}_scale": (rng.random(given[name].shape[1::2]) + 0.5).astype("float32") for name in "kv"}
    want = compute_reference(p, **given)["y"]
    inputs = given | {"y": np.full((1, 2, q_len, 64), np.nan, "float16")}
    inputs |= {name: given[name].view(np.uint8) for name in "kv" if codec is not None}
    names = p.parameters()

    def right(after: list[Any]) -> bool:
        return np.allclose(after[names.index("y")].astype("float64"), want, atol=2e-3, equal_nan=True)

    module = emulated.module({"attention": attention_kernel(p, GPU, tiles, DECODE)}, arch=GPU.arch)
    left = survivors(module, "attention", [inputs[x] for x in names], right)
    assert [step.name for step in left] == REDUNDANT[name]
