"""Training through a compiled attention: forward and backward are modules of ours, called from PyTorch.

A small language model learns to copy the token that stood some places before, with causal attention, a soft cap on its
scores, and a bias by distance that is learned: a captured array, which gets a gradient as weights do. An
autograd.Function calls the compiled module. The same model with PyTorch's own attention, written out, starts from the
same weights, sees the same batches, and has the same loss in every step.

Needs torch:

    pip install torch==2.13.0 .
    python examples/10_train_with_flex.py
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

import lowering
from lowering import flex

WORDS, WIDTH, HEADS, LENGTH, BATCH, BACK = 32, 64, 4, 64, 16, 3
CAP = 15.0

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def score(s, b, h, i, j, *, bias):  # type: ignore[no-untyped-def]
    """A soft cap, then a learned bias by head and distance."""
    return CAP * flex.tanh(s / CAP) + bias[h, i - j]


class Compiled(torch.autograd.Function):
    """Attention by a module that `compile_flex` made with backward=True."""

    module: flex.FlexModule

    @staticmethod
    def forward(ctx, q, k, v, bias):  # type: ignore[no-untyped-def]
        q, k, v, bias = (x.detach().contiguous() for x in (q, k, v, bias))
        y, ctx.saved = Compiled.module.forward_with_context(q, k, v, bias=bias)
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        found = Compiled.module.backward(dy.contiguous(), ctx.saved)
        return found["dq"], found["dk"], found["dv"], found["d_bias"]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same in PyTorch."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    s = CAP * torch.tanh(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) / CAP) + bias[:, i - j]
    return torch.softmax(s.masked_fill(j > i, -math.inf), dim=-1) @ v


class Decoder(nn.Module):
    """One layer of attention between an embedding and a projection."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.embedding, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.zeros(HEADS, LENGTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(x).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = self.attend(q, k, v, self.bias).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        return self.out(x + y)


def train(attend: Attend, steps: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model, losses = Decoder(attend), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        ids = torch.randint(WORDS, (BATCH, LENGTH))
        logits = model(ids)[:, BACK:]
        loss = functional.cross_entropy(logits.reshape(-1, WORDS), ids[:, :-BACK].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    shape = ("batch", HEADS, LENGTH, WIDTH // HEADS)
    bias = flex.ArraySpec("float32", rank=2)
    Compiled.module = lowering.compile_flex(
        shape, shape, shape, score, flex.masks.causal, captures={"bias": bias}, backward=True
    )
    print(f"{'':12} first loss   last loss   seconds")
    curves = {}
    for name, attend in (("compiled", Compiled.apply), ("PyTorch's", written_out)):
        start = time.perf_counter()
        curves[name] = train(attend, steps)
        print(f"{name:12} {curves[name][0]:10.4f}  {curves[name][-1]:10.4f}  {time.perf_counter() - start:8.1f}")
    apart = max(abs(a - b) for a, b in zip(*curves.values()))
    print(f"largest difference of the losses: {apart:.1e}")
    assert apart < 1e-3 and curves["compiled"][-1] < 0.5 * curves["compiled"][0]


if __name__ == "__main__":
    main()
