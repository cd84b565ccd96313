"""No barrier, wait or fence of a shipped kernel can be left out unnoticed.

All steps of a kernel are needed. All needed steps are there, since the whole kernel passes under the emulation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowering.attention.record.cache_layout import CacheLayout, KvQuantization
from lowering.attention.record.problem import AttentionProblem, Window
from lowering.attention.reference import compute_reference
from schedules.cuda.attention.attention import attention_kernel
from schedules.cuda.attention.attention_tiles import MmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.primitives.device import DEVICES
from tests import cuda_emulation as emulated
from tests.cuda_emulation.mutations import survivors

pytestmark = pytest.mark.no_gpu

GPU = DEVICES["sm_80"]
DECODE = DecodeTiles(keys=16, warps=2, stages=3, blocks=2, split=64)
FLOAT8 = KvQuantization("float8_e4m3fn", 0, channels=True)
# By tiles of prefill, query rows, keys before them, and types of keys and values. Every loop has enough iterations to
# need all of its steps; in prefill, the first tile of rows sees no key.
KERNELS = {
    "prefill, a stage": (MmaTiles(64, 16, 2), 200, -70, None),
    "prefill, stages": (MmaTiles(64, 16, 2, stages=2), 200, -70, None),
    "prefill, Q in registers": (MmaTiles(32, 16, 2, q_in_registers=True), 200, -70, None),
    "prefill, quantized": (MmaTiles(64, 16, 2, stages=2), 200, -70, FLOAT8),
    "decode": (MmaTiles(64, 16, 2), 3, 96, None),
    "decode, quantized": (MmaTiles(64, 16, 2), 3, 96, FLOAT8),
}
# Before it stores Y where Q was, prefill waits for all threads and copies. It has done so where Q is in registers or
# multiplied by scales. Decode dequantizes for the lanes of a warp, whose races the emulator does not see.
REDUNDANT = {
    "prefill, a stage": [],
    "prefill, stages": [],
    "prefill, Q in registers": ["ptx_cp_async_wait_group_async_wait_group_0", "cuda_cta_sync"],
    "prefill, quantized": ["ptx_cp_async_wait_group_async_wait_group_0", "cuda_cta_sync"],
    "decode": [],
    "decode, quantized": ["cuda_warp_sync"] * 4,
}


def problem(q_len: int, quantization: KvQuantization | None) -> AttentionProblem:
    """Return a causal problem with values that are longer than keys, so that Y does not fit where Q was."""
    sizes: dict[str, Any] = {"batch": 1, "q_len": q_len, "kv_len": None, "q_heads": 2, "kv_heads": 1}
    types: dict[str, Any] = {"dtype": "float16", "v_dtype": "float16", "acc_dtype": "float32"}
    window = Window(right=0, offset="past")
    dims: dict[str, Any] = {"head_dim": 32, "v_head_dim": 64, "scale": 0.2}
    return AttentionProblem(**sizes, **types, **dims, window=window, layout=CacheLayout(quantization=quantization))


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_can_be_left_out(name: str) -> None:
    tiles, q_len, past, quantization = KERNELS[name]
    p, kv_len, rng = problem(q_len, quantization), 140, np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, heads, length, dim)).astype("float16")
        for heads, length, dim in ((2, q_len, 32), (1, kv_len, 32), (1, kv_len, 64))
    )
    v[:, :, past + q_len // 2, 5] = np.inf  # some rows see it, so prefill visits their tile again
    feeds: dict[str, Any] = {"q": q, "k": k, "v": v, "past": past}
    if quantization is not None:  # its infinities are NaN
        feeds |= {name: feeds[name].astype(quantization.dtype) for name in "kv"}
        feeds |= {f"{name}_scale": (rng.random(feeds[name].shape[1::2]) + 0.5).astype("float32") for name in "kv"}
    want = compute_reference(p, **feeds)["y"]
    inputs = feeds | {"y": np.full((1, 2, q_len, 64), np.nan, "float16")}
    inputs |= {name: feeds[name].view(np.uint8) for name in "kv" if quantization is not None}
    names = p.parameters()

    def right(after: list[Any]) -> bool:
        return np.allclose(after[names.index("y")].astype("float64"), want, atol=2e-3, equal_nan=True)

    module = emulated.module({"attention": attention_kernel(p, GPU, tiles, DECODE)}, arch=GPU.arch)
    left = survivors(module, "attention", [inputs[x] for x in names], right)
    assert [step.name for step in left] == REDUNDANT[name]
