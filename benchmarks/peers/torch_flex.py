"""PyTorch's compiled flex_attention; and for gradients, which that has none of on a CPU, scaled_dot_product_attention
and scores that are written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ..cases.flex import FlexCase
from . import Contender, Form

Mod = Callable[..., Any] | None


def flex_forms(case: FlexCase, threads: int) -> dict[str, Form]:
    if not case.gradient:
        return {"FlexAttention": Form(partial(_forward, case, threads), threads)}
    forms = {"written out": Form(partial(_written_out, case, threads), threads)}
    if case.variant in ("full", "causal"):
        forms["SDPA"] = Form(partial(_fused, case, threads), threads)
    return forms


def _mods(case: FlexCase) -> tuple[Mod, Mod]:
    """score_mod and mask_mod."""
    captured = {name: torch.from_numpy(x) for name, x in case.captures.items()}

    def near(at: Any, key: Any, extent: int) -> Any:
        center = at.clamp(6, extent - 1 - 6)
        return (key - center).abs() <= 6

    mods: dict[str, tuple[Mod, Mod]] = {
        "full": (None, None),
        "causal": (None, lambda b, h, i, j: i >= j),
        "window of 256": (None, lambda b, h, i, j: (i >= j) & (i - j <= 256)),
        "documents": (None, lambda b, h, i, j: (captured["document"][i] == captured["document"][j]) & (i >= j)),
        "soft cap": (lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0), None),
        "ALiBi": (lambda s, b, h, i, j: s + captured["slopes"][h] * (j - i), None),
        "prefix of 512": (None, lambda b, h, i, j: (j < 512) | (i >= j)),
        "neighborhood": (None, lambda b, h, i, j: near(i // 64, j // 64, 32) & near(i % 64, j % 64, 64)),
    }
    return mods[case.variant]


def _forward(case: FlexCase, threads: int) -> Contender:
    torch.set_num_threads(threads)
    score, mask = _mods(case)
    q, k, v = (torch.from_numpy(case.feeds()[name]) for name in "qkv")
    blocks = None if mask is None else create_block_mask(mask, None, None, case.S, case.S, device="cpu")
    attend = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return attend(q, k, v, score_mod=score, block_mask=blocks)

    return Contender(call, lambda y: {"y": y.numpy()})


def _gradients(case: FlexCase, threads: int, attend: Callable[..., Any]) -> Contender:
    feeds = case.feeds()
    q, k, v = (torch.from_numpy(feeds[name]).requires_grad_() for name in "qkv")
    dy = torch.from_numpy(feeds["dy"])
    torch.set_num_threads(threads)
    y = attend(q, k, v)

    def call() -> Any:
        torch.set_num_threads(threads)
        return torch.autograd.grad(y, (q, k, v), dy, retain_graph=True)

    return Contender(call, lambda gradients: {name: x.numpy() for name, x in zip(("dq", "dk", "dv"), gradients)})


def _fused(case: FlexCase, threads: int) -> Contender:
    causal = case.variant == "causal"
    return _gradients(case, threads, partial(functional.scaled_dot_product_attention, is_causal=causal))


def _written_out(case: FlexCase, threads: int) -> Contender:
    score, mask = _mods(case)

    def attend(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.transpose(2, 3) / math.sqrt(case.D)
        indices = torch.arange(1)[:, None, None, None], torch.arange(case.H)[:, None, None]
        pair = *indices, torch.arange(case.S)[:, None], torch.arange(case.S)
        if score is not None:
            s = score(s, *pair)
        if mask is not None:
            s = s.masked_fill(~mask(*pair), -math.inf)
        return torch.softmax(s, dim=-1) @ v

    return _gradients(case, threads, attend)
