"""The limits of the GPU: copying memory, and multiplying bfloat16 matrices, on random data. Reading is a case."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .card import card
from .timing import interleaved

_BYTES, _SIZE = 1 << 30, 8192
_TINY = 1 << 10  # bytes, and squared the size, of a rehearsal


def about(say: Callable[[str], None]) -> dict[str, Any]:
    """Return the GPU's properties, and the versions of the software on it."""
    return card().about()


def copy(say: Callable[[str], None]) -> dict[str, Any]:
    """{"rate": bytes read and written in a second}.

    The kernel inverts what it copies: a plain copy in a graph goes to the copy engines, which are slower.
    """
    gpu = card()
    size = _BYTES if gpu.device == "cuda" else _TINY
    sources = [torch.randint(1 << 62, (size // 8,), device=gpu.device) for _ in range(3)]
    target = torch.empty_like(sources[0])
    timing = interleaved({"copy": [partial(torch.bitwise_not, source, out=target) for source in sources]}, gpu)["copy"]
    return {"rate": 2 * size / timing.median}


def matmul(say: Callable[[str], None]) -> dict[str, Any]:
    """{"rate": FLOP in a second}."""
    gpu = card()
    size = _SIZE if gpu.device == "cuda" else int(_TINY**0.5)
    pairs = [[torch.randn(size, size, device=gpu.device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(3)]
    out = torch.empty_like(pairs[0][0])
    timing = interleaved({"FLOP": [partial(torch.mm, a, b, out=out) for a, b in pairs]}, gpu)["FLOP"]
    return {"rate": 2 * size**3 / timing.median}
