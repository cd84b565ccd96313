"""A step of the decoder beside the same in PyTorch, compiled: one token for each sequence, caches filled to a place."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from . import drawn
from .timing import TURNS, Timing, seconds

CAPACITY, PLACE = 2048, 1024
TOLERANCE = 2e-2  # of logits, relative to their range: sixteen layers in float16


class Decoder(torch.nn.Module):
    """As PyTorch's users write it for torch.compile: caches that stay, one product for Q, K and V."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], batch: int) -> None:
        super().__init__()
        self.c, self.layers = config, range(config["layers"])
        some = next(iter(weights.values()))
        self.dtype, device = some.dtype, some.device
        self.batches = torch.arange(batch, device=device)

        def keep(name: str, tensor: torch.Tensor) -> None:
            self.register_buffer(name.replace(".", "_"), tensor.contiguous())

        for n in self.layers:
            parts = [weights.pop(f"layer{n}.w{name}") for name in "qkv"]
            keep(f"qkv{n}", torch.cat([part.T for part in parts]))
            for name in ("wo", "w1", "w3", "w2"):
                keep(f"{name}{n}", weights.pop(f"layer{n}.{name}").T)
            for name in ("k", "v"):
                shape = (batch, config["kv_heads"], CAPACITY, config["head_dim"])
                keep(f"{name}{n}", torch.zeros(shape, dtype=self.dtype, device=device))
        keep("head", weights.pop("lm_head").T)
        keep("embedding", weights.pop("embedding"))
        keep("norm", torch.ones(config["hidden"], dtype=self.dtype, device=device))
        frequency = 10000.0 ** (-torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"])
        angle = torch.arange(config["positions"])[:, None] * frequency
        for name, table in (("cos", angle.cos()), ("sin", angle.sin())):
            keep(name, table.to(device, self.dtype))

    def forward(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        c, batch = self.c, ids.shape[0]
        x = functional.embedding(ids[:, 0], self.embedding)
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        seen = (torch.arange(CAPACITY, device=at.device)[None] <= at[:, None])[:, None, None]

        def turned(rows: torch.Tensor) -> torch.Tensor:
            low, high = rows.chunk(2, dim=-1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

        for n in self.layers:
            rows = functional.linear(self._normed(x), getattr(self, f"qkv{n}"))
            q, k, v = rows.view(batch, -1, c["head_dim"]).split([c["heads"], c["kv_heads"], c["kv_heads"]], dim=1)
            keys, values = getattr(self, f"k{n}"), getattr(self, f"v{n}")
            keys[self.batches, :, at], values[self.batches, :, at] = turned(k), v
            y = functional.scaled_dot_product_attention(
                turned(q)[:, :, None], keys, values, attn_mask=seen, enable_gqa=True
            )
            x = x + functional.linear(y.reshape(batch, -1), getattr(self, f"wo{n}"))
            h = self._normed(x)
            gated = functional.silu(functional.linear(h, getattr(self, f"w1{n}")))
            gated = gated * functional.linear(h, getattr(self, f"w3{n}"))
            x = x + functional.linear(gated, getattr(self, f"w2{n}"))
        return functional.linear(self._normed(x), self.head)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.norm, 1e-5)


def decoding(folder: Path, batch: int, say: Callable[[str], None]) -> dict[str, Any]:
    """{contender: {"error", "timing"}} of steps of the artifact in `folder`, "ours", and of torch.compile, "compiled".

    Raises ValueError for logits that are wrong.
    """
    say("weights")
    made = drawn.fill(folder)
    config = made["config"]
    weights = {name: torch.from_numpy(part.draw()).cuda() for name, part in drawn.parts(made).items()}
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(config["vocabulary"], (batch, 1), generator=generator, device="cuda")
    at = torch.full((batch,), PLACE, device="cuda")
    say("right")
    with torch.inference_mode():
        exact = Decoder(config, {name: weight.float() for name, weight in weights.items()}, batch)
        for _, cache in _caches(exact):
            cache[:, :, :PLACE] = torch.randn(
                cache[:, :, :PLACE].shape, generator=generator, device="cuda"
            ).half()  # what both can hold
        start = {name: cache.half() for name, cache in _caches(exact)}
        right = exact(ids, at)
        del exact
        torch.cuda.empty_cache()
    say("ours")
    calls = {"ours": ours(folder, ids, at, start)}
    say("compiled")
    calls["compiled"] = compiled(config, weights, ids, at, start)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        say(f"{name} is checked")
        error = float((call().float() - right).abs().max() / (right.max() - right.min()))
        if not error <= TOLERANCE:
            raise ValueError(f"{name} is wrong: error {error:.2g}")
        found[name] = {"error": error}
    say("timing")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(seconds(call, 20))
    for name, each in times.items():
        found[name]["timing"] = dataclasses.asdict(Timing(statistics.median(each), min(each), max(each), graph=True))
    return found


def _caches(decoder: Decoder) -> list[tuple[str, torch.Tensor]]:
    """By the names that the artifact has for them."""
    return [(f"cache_{kind}.{n}", getattr(decoder, f"{kind}{n}")) for n in decoder.layers for kind in "kv"]


def ours(folder: Path, ids: torch.Tensor, at: torch.Tensor, start: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """A step as one CUDA graph; gives the logits."""
    import lowering

    module = lowering.load(folder)
    caches = {name: cache.clone() for name, cache in start.items()}
    step = module.bind({"ids": ids, "write_indices": at, **caches}, graph=True)
    return lambda: step()["logits"]


def compiled(
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    ids: torch.Tensor,
    at: torch.Tensor,
    start: dict[str, torch.Tensor],
) -> Callable[[], Any]:
    """The same by torch.compile, with CUDA graphs."""
    decoder = Decoder(config, weights, len(ids))
    for name, cache in _caches(decoder):
        cache.copy_(start[name])
    step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return step(ids, at)

    for _ in range(3):  # compiles, warms up, captures
        call()
    return call
