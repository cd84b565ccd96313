"""Weights that travel compressed: benchmarks' own repeat themselves, and become a hundredth of their size."""

from __future__ import annotations

import lzma
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lowering.manifest import WEIGHTS

PACKED = f"{WEIGHTS}.xz"
PERIOD = 61 * 67  # of repeated numbers: no multiple of a tile's size


def repeat(tile: np.ndarray, shape: tuple[int, ...], start: int = 0) -> np.ndarray:
    """The numbers of a tile again and again, row by row, from the one at `start` on."""
    return np.resize(np.roll(tile.reshape(-1), -start), shape)


def mixture_matrices(tile: np.ndarray, size: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The weights of com.microsoft MoE, [experts, columns, depth], which repeat the numbers of a tile."""
    up, down = (size["experts"], size["inner"], size["width"]), (size["experts"], size["width"], size["inner"])
    return {name: repeat(tile, shape, n) for n, (name, shape) in enumerate((("fc1", up), ("fc2", down), ("fc3", up)))}


def pack(artifact: Path) -> None:
    """Replace the artifact's weights by a compressed file."""
    weights = artifact / WEIGHTS
    if weights.exists():
        with weights.open("rb") as source, lzma.open(artifact / PACKED, "wb", preset=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        weights.unlink()


def unpack(artifact: Path) -> Path:
    """The artifact, whose weights are there from now on."""
    if (artifact / PACKED).exists() and not (artifact / WEIGHTS).exists():
        partial = artifact / f"{WEIGHTS}.{os.getpid()}"
        with lzma.open(artifact / PACKED) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        partial.replace(artifact / WEIGHTS)
    return artifact
