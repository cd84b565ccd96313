"""What the GPU could do: copying memory, and products of bfloat16 matrices, on random data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .timing import interleaved

_BYTES, _SIZE = 1 << 30, 8192


def limits(say: Callable[[str], None]) -> dict[str, Any]:
    """Per second: "byte" read and written by a kernel that copies, "FLOP" of a matrix product; and versions.

    The kernel inverts what it copies: a plain copy in a graph goes to the copy engines, which are slower.
    """
    say("copies and products")
    sources = [torch.randint(1 << 62, (_BYTES // 8,), device="cuda") for _ in range(3)]
    target = torch.empty_like(sources[0])
    pairs = [[torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(3)]
    out = torch.empty_like(pairs[0][0])
    timings = interleaved(
        {
            "byte": [partial(torch.bitwise_not, source, out=target) for source in sources],
            "FLOP": [partial(torch.mm, a, b, out=out) for a, b in pairs],
        }
    )
    properties = torch.cuda.get_device_properties(0)
    return {
        "byte": 2 * _BYTES / timings["byte"].median,
        "FLOP": 2 * _SIZE**3 / timings["FLOP"].median,
        "multiprocessors": properties.multi_processor_count,
        "l2": properties.L2_cache_size,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
