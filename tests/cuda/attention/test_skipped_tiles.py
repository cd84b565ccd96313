"""Tiles of keys that no row sees are not multiplied: matmuls are counted, and compared with the mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import lowering
from lowering.flex import masks
from lowering.flex.captured import read_array_specs
from lowering.flex.problem import FlexProblem, build_settings
from schedules.cuda.attention.attention_tiles import MmaTiles, WgmmaTiles
from schedules.cuda.attention.decode_tiles import DecodeTiles
from schedules.cuda.primitives.device import DEVICES
from tests import cuda_emulation as emulated
from tests.cuda.attention.prefill_cases import formula, problem
from tests.cuda.audits.machine_code import matmuls
from tests.cuda_emulation import device
from tests.flex.flex_reference import compute_visible

pytestmark = pytest.mark.no_gpu

HEADS, KV_HEADS, DIM, KEYS = 2, 1, 16, 700
Mod = Callable[..., Any]


@dataclass(frozen=True)
class Masked:
    mask: Mod
    captures: dict[str, np.ndarray]
    blocks: tuple[int, int] | None = None


def by_blocks(b, h, i, j, *, shown):
    return shown[b, h, i // 128, j // 128]


SHOWN = np.random.default_rng(3).random((1, HEADS, 6, 6)) < 0.3
MASKS = {
    "all": Masked(masks.full, {}),
    "causal": Masked(masks.causal, {}),
    "window": Masked(masks.sliding_window(100), {}),
    "documents": Masked(masks.document(masks.causal), masks.documents([150] * 5)),
    "documents without a mask": Masked(masks.document(), masks.documents([150] * 5)),
    "documents that come back": Masked(masks.document_by_batch, {"document": np.arange(KEYS)[None] // 200 % 2}),
    "heads of two kinds": Masked(lambda b, h, i, j: (i >= j) & ((h == 0) | (i - j < 64)), {}),
    "an array of blocks": Masked(by_blocks, {"shown": SHOWN}),
    "a block mask": Masked(masks.causal, {}, (128, 128)),
    "nothing": Masked(lambda b, h, i, j: i + j < 0, {}),
}


def counted(name: str, rows: int, arch: str) -> int:
    """Count the matmuls of a call, in the emulation's process."""
    masked, kind = MASKS[name], ("batch", HEADS, rows, DIM)
    specs = read_array_specs(masked.captures)
    settings = build_settings(None, masked.mask, specs, "float16", None, DIM, masked.blocks)
    kv, blocks = ("batch", KV_HEADS, "keys", DIM), None if masked.blocks is None else (False, True)
    model = lowering.compile(
        FlexProblem("float16", kind, kv, kv, settings, tuple(specs.items()), blocks).to_onnx(), f"cuda:{arch}"
    )
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, *sizes, DIM)).astype("f2") for sizes in ((HEADS, rows), (KV_HEADS, KEYS)))
    feeds = {"q": q, "k": k, "v": k, **masked.captures}
    if masked.blocks is not None:
        feeds[model.inputs[3].name] = SHOWN[:, :, : -(-rows // 128)].astype("i1")
    device.take_matmuls()
    model.run(feeds)
    return device.take_matmuls()


def seen_tiles(dense: np.ndarray, rows: int, keys: int) -> int:
    """Count the tiles of a mask [heads, S, T] in which anything is visible."""
    heads, s, t = dense.shape
    whole = np.zeros((heads, -(-s // rows) * rows, -(-t // keys) * keys), bool)
    whole[:, :s, :t] = dense
    return int(whole.reshape(heads, -(-s // rows), rows, -(-t // keys), keys).any((2, 4)).sum())


def dense(name: str, rows: int) -> np.ndarray:
    masked = MASKS[name]
    shown = compute_visible(masked.mask, (1, HEADS, rows, KEYS), masked.captures)[0]
    if masked.blocks is not None:
        shown = shown & SHOWN[0].repeat(128, 1).repeat(128, 2)[:, :rows, :KEYS]
    return shown


BY_HEAD = ("heads of two kinds", "an array of blocks", "a block mask")
QUICK = {
    "sm_80": ("causal", "documents that come back", "heads of two kinds", "a block mask"),
    "sm_90a": ("a block mask",),
}


def prefills() -> Iterator[Any]:
    for arch, name in itertools.product(QUICK, MASKS):
        yield pytest.param(name, arch, marks=() if name in QUICK[arch] else pytest.mark.slow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "arch"), prefills())
def test_prefill(name: str, arch: str) -> None:
    """A tile is multiplied only if some row of a tile of rows sees some key of it."""
    p, gpu = problem(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, mask=formula()), DEVICES[arch]
    tiles: Any = WgmmaTiles.default(p, gpu) if arch == "sm_90a" else MmaTiles.default(p, gpu)
    workers = tiles.consumers if arch == "sm_90a" else tiles.warps
    count = emulated.run(counted, name, KEYS, arch, arch=arch, timeout=500)
    # Bounds of positions in documents ignore that both are in one. Only the documents of that mask count.
    shown, rows = dense("documents without a mask" if name == "documents" else name, KEYS), tiles.q
    if arch == "sm_90a" and name not in BY_HEAD:  # heads that share keys are rows of one tile
        shown, rows = shown[:1], tiles.q // HEADS
    assert count == seen_tiles(shown, rows, tiles.kv) * workers * matmuls(p, tiles)


@pytest.mark.parametrize(
    "name",
    [
        "window",
        "a block mask",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("all", "causal", "documents that come back", "nothing")
        ),
    ],
)
def test_decoding(name: str) -> None:
    """Both query heads of the two rows are one tile of rows."""
    p, gpu = problem(q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM), DEVICES["sm_80"]
    tiles = DecodeTiles.default(p, gpu)
    matmuls_of_tile = tiles.keys // 8 * (DIM // 16) + tiles.keys // 16 * (DIM // 8)
    count = emulated.run(counted, name, 2, "sm_80", arch="sm_80", timeout=500)
    assert count == seen_tiles(dense(name, 2).reshape(1, -1, KEYS), HEADS * 2, tiles.keys) * matmuls_of_tile
