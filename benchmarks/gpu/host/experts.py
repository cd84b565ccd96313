"""A mixture of experts, compared with the same in PyTorch: routing by its operators, and its grouped matmul."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..plan import Program
from .card import Card, card
from .packed import mixture_matrices
from .programs import load, right
from .timing import repeated


def time_experts(folder: Path, program: Program, say: Callable[[str], None]) -> dict[str, Any]:
    """{"error", "times": {"8 tokens": timing, "torch, 8 tokens": timing ...}}, of each number of tokens.

    details: experts, chosen, width, inner, tokens, tolerance. Raises ValueError for answers that are wrong.
    """
    import torch

    say("loading")
    gpu, size, module = card(), program.details, load(folder, program)
    tile = np.load(folder / program.folder / "tiles.npz")["values"]
    weights = {name: torch.from_numpy(array).to(gpu.device) for name, array in mixture_matrices(tile, size).items()}
    errors, times = [], {}
    for tokens in size["tokens"]:
        say(f"{tokens} tokens")
        memory = gpu.memory(seed=tokens)
        x, router = (memory.normal((tokens, n), "float16") for n in (size["width"], size["experts"]))
        call = module.bind({"x": gpu.upload(x), "router": gpu.upload(router)}, graph=True)
        expected = _expected(x, router, weights, size["chosen"])
        errors.append(
            float((gpu.download(call()["y"]).double() - expected).abs().max() / (expected.max() - expected.min()))
        )
        times[f"{tokens} tokens"] = dataclasses.asdict(repeated(call, gpu))
        peer = _grouped(x, router, weights, size["chosen"])
        if peer is not None:
            times[f"torch, {tokens} tokens"] = dataclasses.asdict(repeated(_captured(peer, gpu), gpu))
    return {"error": right(errors, program), "times": times}


def _route(router: Any, chosen: int) -> tuple[Any, Any]:
    """The weights of the experts of each token, which sum to 1, and their numbers."""
    factors, experts = router.float().softmax(-1).topk(chosen, -1)
    return factors / factors.sum(-1, keepdim=True), experts


def _expected(x: Any, router: Any, weights: Mapping[str, Any], chosen: int) -> Any:
    """Return Y in float64, expert by expert."""
    import torch

    factors, experts = _route(router, chosen)
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number in range(len(weights["fc1"])):
        rows, index = (experts == number).nonzero(as_tuple=True)
        gate, down, up = (weights[name][number].double().T for name in ("fc1", "fc2", "fc3"))
        hidden = torch.nn.functional.silu(x[rows].double() @ gate) * (x[rows].double() @ up)
        y.index_add_(0, rows, hidden @ down * factors[rows, index, None].double())
    return y


def _grouped(x: Any, router: Any, weights: Mapping[str, Any], chosen: int) -> Callable[[], Any] | None:
    """The same by PyTorch's grouped matmul in bfloat16, the type that it takes; None where there is none."""
    import torch

    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped_mm is None or not x.is_cuda:
        return None
    gate_and_up = torch.cat([weights["fc1"], weights["fc3"]], 1).bfloat16().transpose(1, 2)
    down, x = weights["fc2"].bfloat16().transpose(1, 2), x.bfloat16()
    numbers = torch.arange(len(weights["fc1"]), device=x.device)[:, None]

    def layer() -> Any:
        factors, experts = _route(router, chosen)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        ends = (flat[None] == numbers).sum(1).cumsum(0).to(torch.int32)
        gate, up = grouped_mm(x[order // chosen], gate_and_up, offs=ends).chunk(2, -1)
        rows = grouped_mm(torch.nn.functional.silu(gate) * up, down, offs=ends)
        weighted = rows * factors.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add_(0, order // chosen, weighted)

    return layer


def _captured(call: Callable[[], Any], gpu: Card) -> Callable[[], Any]:
    """The call as a graph, as ours is one."""
    import torch

    stream = torch.cuda.Stream(gpu.device)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
