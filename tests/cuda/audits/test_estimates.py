"""First candidates of a tuner on a GPU: the estimate of tiles agrees with published tiles that were measured."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest

from lowering.attention.record.problem import AttentionProblem, Window
from schedules.cuda.attention.attention_tiles import MmaTiles, WgmmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles, RowTiles
from schedules.cuda.primitives.device import DEVICES, Device
from schedules.tiles import Tiles

pytestmark = pytest.mark.no_gpu

KERNELS = [
    ("sm_80", MmaTiles, 4096),
    ("sm_89", MmaTiles, 4096),
    ("sm_90a", MmaTiles, 4096),
    ("sm_90a", WgmmaTiles, 4096),
    ("sm_80", DecodeTiles, 1),
    ("sm_90a", DecodeTiles, 1),
    ("sm_80", RowTiles, 1),
]


def problem(rows: int, head_dim: int, causal: bool = False, batch: int = 4) -> AttentionProblem:
    """Return a problem of Llama-like heads over 4096 keys."""
    return AttentionProblem(
        batch=batch, q_len=rows, kv_len=4096, q_heads=32, kv_heads=8, head_dim=head_dim, v_head_dim=head_dim,
        dtype="float16", v_dtype="float16", acc_dtype="float32", scale=0.1,
        window=Window(right=0) if causal else None,
    )  # fmt: skip


def legal(kind: type[Tiles], p: AttentionProblem, device: Device) -> Iterator[Tiles]:
    space = kind.space(p, device)
    for values in itertools.product(*space.values()):
        tiles = kind(**dict(zip(space, values)))
        if tiles.is_legal(p, device):
            yield tiles


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("arch, kind, rows", KERNELS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_published_tiles_are_among_the_best(
    arch: str, kind: type[Tiles], rows: int, head_dim: int, causal: bool
) -> None:
    """Defaults are the tiles that FlashAttention publishes, or those for bandwidth times latency."""
    p, device = problem(rows, head_dim, causal), DEVICES[arch]
    estimates = sorted(tiles.estimate(p, device) for tiles in legal(kind, p, device))
    default = kind.default(p, device).estimate(p, device)
    assert default - estimates[0] < math.log(1.15)  # compared with the best
    assert math.exp(estimates[-1] - default) > 1.1  # compared with the worst


def test_slow_tiles_are_last() -> None:
    """Each has a cost: one warp, a short tile, no copy under way, blocks of an odd share of the GPU."""
    p, a100, h100 = problem(4096, 128), DEVICES["sm_80"], DEVICES["sm_90a"]
    good = MmaTiles.default(p, a100).estimate(p, a100)
    assert MmaTiles(q=16, kv=16, warps=1).estimate(p, a100) > good + math.log(2)
    assert MmaTiles(q=256, kv=32, warps=8).estimate(p, a100) > good
    best = WgmmaTiles.default(p, h100).estimate(p, h100)
    assert WgmmaTiles(1, 32, 240, 24, ping_pong=False).estimate(p, h100) > best + math.log(1.5)
    single = dataclasses.replace(problem(1, 128, batch=1), kv_len=16384)  # eight heads for 108 SMs
    split = DecodeTiles.default(single, a100)
    whole = DecodeTiles(split.keys, split.warps, split.stages, split=16384)
    assert whole.estimate(single, a100) > split.estimate(single, a100) + math.log(2.5)
    assert RowTiles(split=16384).estimate(single, a100) > RowTiles.default(single, a100).estimate(single, a100)
