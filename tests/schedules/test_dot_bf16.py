"""Attention in matmuls of bfloat16 pairs: the instruction is used, and results are as exact as its weights allow."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm

import schedules
from lowering.attention.codegen.plain import build_plain_attention
from lowering.attention.record.problem import AttentionProblem, Mask, Window
from lowering.attention.reference import compute_reference
from lowering.target import host_features
from tests.schedules.test_attention_cpu import (
    BF16,
    CAUSAL,
    SIZES,
    THREE_D,
    call,
    draw,
    problem,
    tensor_at_end,
    unaligned_tensor,
)
from tests.support.this_machine import WIDEST

pytestmark = pytest.mark.optimized

PROBLEMS = {
    "full": problem(**BF16),
    "causal, 3-D, pairs no vector divides": problem(window=CAUSAL, head_dim=74, v_head_dim=41, **BF16, **THREE_D),
    "mask per row": problem(mask=Mask("bool", (1, 1, None, None)), **BF16),
    "one word of a key, mask per head, soft cap, window": problem(
        head_dim=2,
        v_head_dim=16,
        **BF16,
        mask=Mask("bfloat16", (None, None, None, None), pad=False),
        softcap=5.0,
        window=Window(left=70),
    ),
    "five heads share a ragged cache": problem(
        q_heads=5, kv_heads=1, head_dim=96, v_head_dim=72, lengths=True, window=Window(3, 0, "lengths"), **BF16
    ),
    "odd sizes, not in pairs": problem(head_dim=17, v_head_dim=33, **BF16),
}
# Machines without the instruction widen to float32, and must be as accurate.
FEATURES = [[], ["+avx512bf16"]] if "avx512_bf16" in host_features() else [[]]


def compiled(p: AttentionProblem, features: list[str]) -> Any:
    mcpu = "x86-64-v4" if features else WIDEST
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": mcpu, "mattr": features})
    return tvm.compile(
        schedules.apply_schedules(tvm.IRModule({"attention": build_plain_attention(p)}), target), target=target
    )


@pytest.mark.parametrize("q_len", [1, 90])
def test_pairs_become_the_instruction(q_len: int) -> None:
    p = problem(q_len=q_len, **BF16)
    assembly = compiled(p, ["+avx512bf16"]).mod.inspect_source("asm")
    assert len(re.findall("vdpbf16ps", assembly)) >= 32
    assert "lowering_dot_bf16" not in re.findall(r"call\w*\s+(\w+)", assembly)
    assert "vdpbf16ps" not in compiled(p, []).mod.inspect_source("asm")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_rounding_is_that_of_the_weights(name: str, features: list[str]) -> None:
    """Each weight may have an error of half a unit in the last position, and the output another one."""
    p = PROBLEMS[name]
    run = compiled(p, features)["attention"]
    for batch, q_len, kv_len in (*SIZES, (1, 2, 1001)):
        inputs = draw(p, batch, q_len, kv_len)
        want = compute_reference(p, **inputs)["y"]
        bound = 2.0**-9 * np.abs(inputs["v"].astype(np.float64)).max()
        for allocate in (unaligned_tensor, tensor_at_end):
            np.testing.assert_allclose(call(run, p, inputs, allocate), want, rtol=2.0**-8, atol=1.01 * bound)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("name", ["mask per row", "causal, 3-D, pairs no vector divides"])
def test_hidden_values_do_not_leak(name: str, features: list[str]) -> None:
    """NaN and infinity in one key of a pair do not change rows that do not see it, whatever the other key is."""
    p = PROBLEMS[name]
    p = PROBLEMS[name]
    run = compiled(p, features)["attention"]
    for q_len, keys in ((90, (30, 35)), (8, (2, 7))):
        inputs = draw(p, 2, q_len, 90)
        for array, poison in [("k", (np.nan, np.inf)), ("v", (np.inf, np.nan))]:
            by_key = inputs[array] if p.layout.axes == "bte" else inputs[array].swapaxes(1, 2)
            by_key[:, keys[0]], by_key[:, keys[1]] = poison
        if "mask" in inputs:
            inputs["mask"][..., 1::2, keys] = False
        want = compute_reference(p, **inputs)["y"]
        clean = np.isfinite(want)
        assert want[clean].any() and not clean.all()
        np.testing.assert_allclose(call(run, p, inputs)[clean], want[clean], rtol=2.0**-8, atol=0.01)
