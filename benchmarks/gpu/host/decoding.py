"""A step of the decoder for one sequence: changing tokens against float32, its time, and its profile by kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from . import drawn
from .card import Card, card
from .profiles import summarize
from .timing import repeated

TOKENS, ROUNDS = 32, 3
PROFILED = 3  # steps
TOLERANCE = 2e-2  # of logits, relative to their range: sixteen layers in float16


class Decoder(torch.nn.Module):
    """A decoder as PyTorch's users write it for torch.compile: static caches, one matmul for Q, K and V."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor], capacity: int) -> None:
        super().__init__()
        self.c, self.layers, self.capacity = config, range(config["layers"]), capacity
        first_weight = next(iter(weights.values()))
        self.dtype, device = first_weight.dtype, first_weight.device

        def keep(name: str, tensor: torch.Tensor) -> None:
            self.register_buffer(name.replace(".", "_"), tensor.contiguous())

        for n in self.layers:
            projections = [weights.pop(f"layer{n}.w{name}") for name in "qkv"]
            keep(f"qkv{n}", torch.cat([projection.T for projection in projections]))
            for name in ("wo", "w1", "w3", "w2"):
                keep(f"{name}{n}", weights.pop(f"layer{n}.{name}").T)
            for name in ("k", "v"):
                shape = (1, config["kv_heads"], capacity, config["head_dim"])
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
        seen = (torch.arange(self.capacity, device=at.device)[None] <= at[:, None])[:, None, None]

        def rotate(rows: torch.Tensor) -> torch.Tensor:
            low, high = rows.chunk(2, dim=-1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

        for n in self.layers:
            rows = functional.linear(self._normalize(x), getattr(self, f"qkv{n}"))
            q, k, v = rows.view(batch, -1, c["head_dim"]).split([c["heads"], c["kv_heads"], c["kv_heads"]], dim=1)
            keys, values = getattr(self, f"k{n}"), getattr(self, f"v{n}")
            keys[:, :, at], values[:, :, at] = rotate(k)[:, :, None], v[:, :, None]
            y = functional.scaled_dot_product_attention(
                rotate(q)[:, :, None], keys, values, attn_mask=seen, enable_gqa=True
            )
            x = x + functional.linear(y.reshape(batch, -1), getattr(self, f"wo{n}"))
            h = self._normalize(x)
            gated = functional.silu(functional.linear(h, getattr(self, f"w1{n}")))
            gated = gated * functional.linear(h, getattr(self, f"w3{n}"))
            x = x + functional.linear(gated, getattr(self, f"w2{n}"))
        return functional.linear(self._normalize(x), self.head)

    def caches(self) -> list[tuple[str, torch.Tensor]]:
        """Return the caches by the names that the artifact has for them."""
        return [(f"cache_{kind}.{n}", getattr(self, f"{kind}{n}")) for n in self.layers for kind in "kv"]

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.norm, 1e-5)


class Step:
    """One sequence: the artifact in `folder` with drawn weights, caches filled up to a position, and tokens to read.

    Caches and tokens are the same in each process.
    """

    def __init__(self, folder: Path, gpu: Card) -> None:
        recipe = drawn.fill(folder)
        self.config, self._tensors, self._gpu = recipe["config"], drawn.read_tensors(recipe), gpu
        self.capacity, self.position = self.config["capacity"], self.config["place"]
        generator = torch.Generator(gpu.device).manual_seed(3)
        shape = (1, self.config["kv_heads"], self.position, self.config["head_dim"])
        names = [f"cache_{kind}.{layer}" for layer in range(self.config["layers"]) for kind in "kv"]
        self.caches = {}
        for name in names:
            cache = torch.zeros((*shape[:2], self.capacity, shape[3]), device=gpu.device, dtype=torch.float16)
            cache[:, :, : self.position] = torch.randn(shape, generator=generator, device=gpu.device)
            self.caches[name] = cache
        vocabulary, count = self.config["vocabulary"], min(TOKENS, self.capacity - self.position)
        self.tokens = torch.randint(vocabulary, (count,), generator=generator, device=gpu.device)
        self._folder = folder
        self._inputs: dict[str, Any] = {}

    def at(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token of that number, [1, 1], and its position, [1]."""
        return self.tokens[number].reshape(1, 1), torch.full((1,), self.position + number, device=self._gpu.device)

    def decoder(self, dtype: torch.dtype) -> Decoder:
        """Return the same in PyTorch, with equal caches."""
        weights = {
            name: torch.from_numpy(tensor.draw()).to(self._gpu.device, dtype) for name, tensor in self._tensors.items()
        }
        decoder = Decoder(self.config, weights, self.capacity)
        for name, cache in decoder.caches():
            cache.copy_(self.caches[name])
        return decoder

    def bind(self) -> Callable[[], Any]:
        """Return a step of ours as one CUDA graph, which gives the logits for the token that `show` has shown."""
        import lowering

        module = lowering.load(self._folder)
        token, position = self.at(0)
        self._inputs = {name: self._gpu.upload(array) for name, array in (("ids", token), ("write_indices", position))}
        bound = module.bind(
            {**self._inputs, **{name: self._gpu.upload(cache) for name, cache in self.caches.items()}}, graph=True
        )
        return lambda: bound()["logits"]

    def show(self, number: int) -> None:
        """Makes the token of that number what the bound step reads."""
        for array, value in zip(self._inputs.values(), self.at(number)):
            self._gpu.write(array, value)


def compare_tokens(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """{"error": the worst, "rounds": [of each]}: ROUNDS times all tokens, against the float32 model.

    Tokens and positions change from step to step, so that what is read too early, or left from the step before, shows.
    Raises ValueError for logits that are wrong.
    """
    gpu = card()
    step = Step(folder, gpu)
    say("float32")
    with torch.inference_mode():
        exact = step.decoder(torch.float32)
        right = [exact(*step.at(number)).clone() for number in range(len(step.tokens))]
    del exact
    say("ours")
    call, rounds = step.bind(), []
    for _ in range(ROUNDS):
        errors = []
        for number in range(len(step.tokens)):
            step.show(number)
            logits = gpu.download(call()).float().reshape(right[number].shape)
            errors.append(float((logits - right[number]).abs().max() / (right[number].max() - right[number].min())))
        rounds.append(max(errors))
    if not max(rounds) <= TOLERANCE:
        raise ValueError(f"wrong: errors of the rounds {rounds}, and {TOLERANCE:.2g} is right")
    return {"error": max(rounds), "rounds": rounds, "tokens": len(step.tokens)}


def time_step(folder: Path, compiled: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """{contender: {"timing"}} of a step of the artifact in `folder`, "ours", and if asked for of torch.compile."""
    gpu = card()
    step = Step(folder, gpu)
    say("ours")
    calls = {"ours": step.bind()}
    if compiled:
        say("compiled")
        calls["compiled"] = _compiled(step)
    say("timing")
    return {name: {"timing": dataclasses.asdict(repeated(call, gpu))} for name, call in calls.items()}


def profile_step(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The kernels of a step, {"kernels": {name: {"seconds", "launches", "median"}}, "span", "busy"}, per step."""
    gpu = card()
    step = Step(folder, gpu)
    call = step.bind()
    for _ in range(2):
        call()
    gpu.synchronize()
    say("profile")

    def steps() -> None:
        for _ in range(PROFILED):
            call()

    return summarize(gpu.launches(steps), PROFILED)


def _compiled(step: Step) -> Callable[[], Any]:
    """Return the same by torch.compile, with CUDA graphs."""
    decoder = step.decoder(torch.float16)
    forward = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    token, position = step.at(0)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return forward(token, position)

    for _ in range(3):  # compiles, warms up, captures
        call()
    return call
