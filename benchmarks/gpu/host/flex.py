"""FlexAttention: a module of ours with a score_mod and a mask_mod, compared with PyTorch's where that is requested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..plan import TOLERANCE, Program
from . import attention
from .card import Card, card
from .mods import Mods, mods
from .programs import load
from .timing import repeated


def time_flex(folder: Path, program: Program, compiled: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """{"error", "times": {"ours": timing}}, and with `compiled` a timing of "torch".

    details: mods (a name of `mods.mods`), shape [B, H, tokens, D], dtype. What else the module reads, the states of a
    block mask and captured arrays, is recorded. Raises ValueError for answers that are wrong.
    """
    import torch

    say("loading")
    gpu, details, module = card(), program.details, load(folder, program)
    memory, shape = gpu.memory(seed=0), details["shape"]
    arrays = {name: memory.normal(shape, details["dtype"]) for name in "qkv"}
    recorded = dict(np.load(folder / program.folder / "inputs.npz"))
    tensors = {name: torch.from_numpy(array).to(gpu.device) for name, array in recorded.items()}
    uploaded = {name: gpu.upload(array) for name, array in {**arrays, **tensors}.items()}
    say("ours")
    call = module.bind(uploaded, graph=True)
    rules = mods(torch.tanh)[details["mods"]]
    captures = {name: tensors[name] for name in rules.captures}
    right = _expected(rules, captures, arrays, gpu)
    error = attention.error(gpu.download(call()["y"]).reshape(shape), right, memory)
    if not error <= TOLERANCE[details["dtype"]]:
        raise ValueError(f"wrong: error {error:.2g}, and {TOLERANCE[details['dtype']]:.2g} is right")
    say("timing")
    times = {"ours": dataclasses.asdict(repeated(call, gpu))}
    if compiled:
        say("torch")
        times["torch"] = dataclasses.asdict(repeated(_torch(rules, captures, arrays, gpu), gpu))
        times["torch"]["graph"] = False
    return {"error": error, "times": times}


def _expected(rules: Mods, captures: dict[str, Any], arrays: dict[str, Any], gpu: Card) -> Any:
    """Y in float64."""
    import torch

    q, k, v = (arrays[name] for name in "qkv")
    y = torch.zeros(q.shape, dtype=torch.float64, device=gpu.device)
    keys = torch.arange(k.shape[2], device=gpu.device)[None]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for start in range(0, q.shape[2], attention.ROWS):
                rows = torch.arange(start, min(start + attention.ROWS, q.shape[2]), device=gpu.device)
                i = rows[:, None]
                s = q[b, h, rows].double() @ k[b, h].double().T * q.shape[3] ** -0.5
                if rules.score is not None:
                    s = rules.score(s, b, h, i, keys, **captures)
                seen = rules.mask(b, h, i, keys, **captures)
                weights = torch.softmax(torch.where(seen, s, -torch.inf), dim=-1)
                y[b, h, rows] = weights @ v[b, h].double()
    return y


def _torch(rules: Mods, captures: dict[str, Any], arrays: dict[str, Any], gpu: Card) -> Callable[[], object]:
    """PyTorch's, compiled, with a block mask that is made before it is timed."""
    import torch
    import torch._inductor.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._inductor.config.compile_threads = 1
    q, k, v = (arrays[name] for name in "qkv")
    mask = partial(rules.mask, **captures) if captures else rules.mask
    score = partial(rules.score, **captures) if captures and rules.score is not None else rules.score

    def of_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return mask(b, h, i, j)

    def of_score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        assert score is not None
        return score(s, b, h, i, j)

    blocks = create_block_mask(of_mask, None, None, q.shape[2], k.shape[2], device=gpu.device)
    attend = torch.compile(flex_attention, dynamic=False)
    return partial(attend, q, k, v, score_mod=of_score if score is not None else None, block_mask=blocks)
