"""Launches with one thread, or one warp, for each work item."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...tiles import Space, Tiles
from .device import Device
from .ptx import WARP, let


@dataclass(frozen=True)
class ThreadTiles(Tiles):
    """Tiles of kernels whose threads are independent, whatever they compute."""

    threads: int = 256
    """Threads per block."""

    @classmethod
    def space(cls, problem: Any, machine: Device) -> Space:
        return {"threads": (64, 128, 256, 512, 1024)}

    def rules(self, problem: Any, machine: Device) -> dict[str, bool]:
        return {f"threads = {self.threads} must be 32 to 1024, by 32": self.threads in range(32, 1025, 32)}


@contextmanager
def launch_threads(count: Expr, tiles: ThreadTiles) -> Iterator[Expr]:
    """Launch threads with indices from 0 to count - 1 (int64), one each; count may be 0."""
    with (
        T.launch_thread("blockIdx.x", tirx.max(tirx.ceildiv(count, tiles.threads), T.int64(1))) as block,
        T.launch_thread("threadIdx.x", tiles.threads) as thread,
    ):
        number = let(block.astype("int64") * tiles.threads + thread)
        with T.If(number < count), T.Then():
            yield number


@contextmanager
def launch_warps(count: Expr, warps: int) -> Iterator[tuple[Expr, Expr]]:
    """Launch warps with indices from 0 to count - 1 (int64), so many per block; count may be 0.

    Yields the index of the warp, and that of the thread in its block.
    """
    with (
        T.launch_thread("blockIdx.x", tirx.max(tirx.ceildiv(count, warps), T.int64(1))) as block,
        T.launch_thread("threadIdx.x", warps * WARP) as thread,
    ):
        number = let(block.astype("int64") * warps + thread // WARP)
        with T.If(number < count), T.Then():
            yield number, thread
