"""Tiles of the CUDA kernels for matmuls."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from ...tiles import Space, Tiles
from ..primitives.cost_model import (
    BARRIER,
    LATENCY,
    SHARED_BANDWIDTH,
    TYPICAL_SIZE,
    mma_sync_rate,
    spread_blocks,
    step_cycles,
)
from ..primitives.device import Device
from .matmul_reader import MatmulShape

STORED = 0.35
"""Cycles to store an element of C from registers to memory, where nothing else runs. Fitted to timings of an H200."""

HIDDEN = 0.6
"""The fraction of them that ping-pong does not hide (docs/cuda_tile_models.md)."""

CACHE_RATE = 1.5
"""Factor by which tiles requested by several blocks arrive faster than the cache's rate for an SM."""

_ADDRESSES = 72  # registers of a thread besides its accumulators


@dataclass(frozen=True)
class MatmulTiles(Tiles):
    """Tiles of `matmul_mma`, with the names of CUTLASS."""

    m: int
    """Rows per block."""
    n: int
    """Columns per block, of all matmuls together."""
    k: int
    """Values of k in shared memory at a time; a multiple of 16."""
    warps_m: int
    """Warps of a block along the rows."""
    warps_n: int
    """Warps of a block along the columns."""
    stages: int
    """Tiles of A, and of B, in shared memory, all but one of which are in flight."""
    swizzle: int = 8
    """Rows of tiles that blocks process together, so that B is read from the second-level cache."""
    split_steps: int = 8
    """Where tiles do not fill the GPU, k is split into ranges of at least so many steps."""

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        """Rows per warp."""
        return self.m // self.warps_m

    def shared_memory(self, shape: MatmulShape) -> int:
        """Return the bytes per block: the stages, or accumulators of 16 rows of each warp in the same memory."""
        staged = self.stages * (self.m + self.n) * self.k * shape.type.bytes
        return max(staged, self.warps_m * self.warps_n * 16 * (self.n // self.warps_n + 8) * 4)

    @classmethod
    def space(cls, problem: MatmulShape, device: Device) -> Space:
        return {
            "m": (32, 64, 128, 256),
            "n": (32, 64, 128, 256),
            "k": (16, 32, 64),
            "warps_m": (1, 2, 4),
            "warps_n": (1, 2, 4),
            "stages": (2, 3, 4, 5),
            "swizzle": (1, 4, 8, 16),
            "split_steps": (4, 8, 16, 32),
        }

    def rules(self, problem: MatmulShape, device: Device) -> dict[str, bool]:
        shared, chunk = self.shared_memory(problem), problem.type.chunk
        columns_per_matmul = self.n // problem.matmuls
        columns = columns_per_matmul // self.warps_n
        accumulators = self.warp_m * columns * problem.matmuls // 32
        divides = self.m % self.warps_m == 0 and self.n % (problem.matmuls * self.warps_n) == 0
        return {
            f"n = {self.n} must be {problem.matmuls} times a power of two": _is_power(columns_per_matmul),
            f"m = {self.m} must be a power of two": _is_power(self.m),
            f"a warp must have {problem.matmuls} times 16 columns and 16 rows, or more": (
                divides and columns >= 16 and self.warp_m >= 16
            ),
            f"k = {self.k} must be 16, 32 or 64": self.k in (16, 32, 64),
            f"stages = {self.stages} must be at least 2": self.stages >= 2,
            f"{self.threads} threads must be 32 to 1024": 32 <= self.threads <= 1024,
            "swizzle and split_steps must be positive": min(self.swizzle, self.split_steps) > 0,
            f"a tile of {min(self.m, columns_per_matmul)} rows must be at least a pass of {self.threads} threads": (
                self.threads * chunk <= min(self.m, columns_per_matmul) * self.k
            ),
            f"{self.threads} threads must be at least the chunks of {max(self.m, columns_per_matmul)} columns": (
                self.threads * chunk >= max(self.m, columns_per_matmul)
            ),
            f"{shared} bytes of shared memory must fit {device.shared_memory}": shared <= device.shared_memory,
            f"{accumulators} accumulators must leave registers": accumulators <= 160,
        }

    def estimate(self, problem: MatmulShape, device: Device) -> float:
        """Estimate the time by the k-steps of the busiest SM: matmuls, shared memory and cache overlap."""
        rows, columns = problem.rows or TYPICAL_SIZE, (problem.columns or TYPICAL_SIZE) * problem.matmuls
        batch, depth = problem.batch or 1, problem.depth or TYPICAL_SIZE
        matmuls = 2 * self.m * self.n * self.k / (mma_sync_rate(device) * problem.type.rate)
        arriving = problem.type.bytes * (self.m + self.n) * self.k
        warps = self.warps_m * self.warps_n
        read = problem.type.bytes * self.k * (self.m * self.warps_n + self.n * self.warps_m)
        accumulators = self.m * self.n // (32 * warps)
        tiles = batch * -(-rows // self.m) * -(-columns // self.n)
        sm_load = spread_blocks(
            tiles, device, self.threads, min(accumulators + _ADDRESSES, 255), self.shared_memory(problem)
        )
        units = max(matmuls, (arriving + read) / SHARED_BANDWIDTH, arriving / device.cache)
        own_cycles = matmuls * 4 / min(warps, 4) + BARRIER
        block_cycles = own_cycles + max(LATENCY - (self.stages - 1) * own_cycles, 0.0)
        steps = -(-depth // self.k)
        return math.log(sm_load.blocks * (steps * step_cycles(units, block_cycles, sm_load.at_once) + LATENCY))

    @classmethod
    def default(cls, problem: MatmulShape, device: Device) -> MatmulTiles:
        """Return untuned but good tiles.

        They are CUTLASS's default for sm_80 (128 x 128 x 32, 64 x 64 per warp; in float32 as many bytes of k), or half
        of it where that would leave most of the GPU idle.
        """
        k = 64 // problem.type.bytes
        stages = 4 if device.shared_memory >= 128 << 10 else 3
        rows, columns = problem.rows or 1 << 20, (problem.columns or 1 << 20) * problem.matmuls
        tiles = (problem.batch or 1) * -(-rows // 128) * -(-columns // 128)
        if rows <= 64 or tiles < device.sm_count // 2:
            return MatmulTiles(64, 64, k, 2, 2 if problem.matmuls <= 2 else 1, stages)
        return MatmulTiles(128, 128, k, 2, 2, stages)


@dataclass(frozen=True)
class WgmmaMatmulTiles(Tiles):
    """Tiles of `matmul_wgmma`, and the distribution of a block's registers."""

    consumers: int
    """Warpgroups that multiply, 64 rows each: 1 or 2."""
    n: int
    """Columns per tile, of all matmuls together."""
    stages: int
    """Tiles of A, and of B, in shared memory."""
    consumer_registers: int
    """Registers per thread of a consumer."""
    producer_registers: int
    """Registers per thread of the producer, which computes nothing."""
    swizzle: int = 8
    """Rows of tiles that blocks process together."""
    split_steps: int = 8
    """The cost of a partial tile, in steps.

    Where tiles do not fill the GPU, k is split into ranges of at least so many steps. Steps are distributed evenly
    where that saves the cost of two partial tiles.
    """
    blocks: int | None = None
    """Maximum number of blocks of the grid, to leave SMs to other kernels. None uses all SMs of the GPU."""
    cluster: int = 1
    """Vertically adjacent blocks that load tiles of B together, each one share for all: 1 or 2."""
    ping_pong: bool = False
    """Whether two consumers have alternating tiles of their own, so that the stores of one overlap the matmuls of the
    other.
    """

    version: ClassVar[int] = 2
    k: ClassVar[int] = 64
    """Values of k that arrive together: 128 bytes, the width of a swizzled tile."""
    store_columns: ClassVar[int] = 32
    """Columns of 16 rows, of all matmuls together, that a warp stores at a time."""

    @property
    def m(self) -> int:
        """Rows per tile."""
        return 64 if self.ping_pong else 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 128 * (self.consumers + 1)

    def staged(self, shape: MatmulShape) -> int:
        """Return the bytes per block of the stages."""
        return self.stages * (self.m + self.n) * self.k * 2

    def shared_memory(self, shape: MatmulShape) -> int:
        """Return the bytes per block: the stages, the accumulators that warps store at a time, and barriers."""
        return self.staged(shape) + self.consumers * 4 * 16 * (self.store_columns + 8) * 4 + 1024

    @classmethod
    def space(cls, problem: MatmulShape, device: Device) -> Space:
        return {
            "consumers": (1, 2),
            "n": (64, 128, 256),
            "stages": (2, 3, 4, 5, 6),
            "consumer_registers": (160, 200, 232, 240),
            "producer_registers": (24, 40),
            "swizzle": (1, 4, 8, 16),
            "split_steps": (4, 8, 16, 32),
            "blocks": (None,),
            "cluster": (1, 2),
            "ping_pong": (False, True),
        }

    def rules(self, problem: MatmulShape, device: Device) -> dict[str, bool]:
        shared, columns_per_matmul = self.shared_memory(problem), self.n // problem.matmuls
        used_registers = self.consumers * self.consumer_registers + self.producer_registers
        at_launch = 65536 // (128 * (self.consumers + 1)) // 8 * 8
        counts = (self.consumer_registers, self.producer_registers)
        return {
            f"consumers = {self.consumers} must be 1 or 2": self.consumers in (1, 2),
            f"n = {self.n} must be {problem.matmuls} times 64, 128 or 256": columns_per_matmul in (64, 128, 256),
            f"n = {self.n} must leave registers": self.n // 2 + 40 <= self.consumer_registers,
            f"stages = {self.stages} must be at least 2": self.stages >= 2,
            f"{counts} registers must be multiples of 8 from 24 to 256": all(n in range(24, 257, 8) for n in counts),
            f"{used_registers} registers per thread of each warpgroup must be available": (
                used_registers <= at_launch * (self.consumers + 1)
            ),
            "swizzle and split_steps must be positive": min(self.swizzle, self.split_steps) > 0,
            f"cluster = {self.cluster} must be 1 or 2": self.cluster in (1, 2),
            f"{self.consumers} consumers must be 2 to take turns": self.consumers == 2 or not self.ping_pong,
            f"{shared} bytes of shared memory must fit {device.shared_memory}": shared <= device.shared_memory,
        }

    def estimate(self, problem: MatmulShape, device: Device) -> float:
        """Estimate the time by the k-steps of the busiest SM, with copies `stages` ahead, and the stores between tiles.

        Ping-pong hides a part of the stores by the matmuls of the other consumer.
        """
        rows, columns = problem.rows or TYPICAL_SIZE, (problem.columns or TYPICAL_SIZE) * problem.matmuls
        batch, depth = problem.batch or 1, problem.depth or TYPICAL_SIZE
        matmuls = 2 * self.m * self.n * self.k / device.tensor_cores
        arriving = 2 * (self.m + self.n) * self.k
        requested = 2 * (self.m + self.n / self.cluster) * self.k
        read = 2 * self.k * (self.m + self.n * self.m // 64)
        tiles = batch * -(-rows // (self.m * self.cluster)) * -(-columns // self.n)
        waves, steps = self.estimate_busiest(tiles, device.sm_count // self.cluster, -(-depth // self.k))
        shared = max(arriving, read) / SHARED_BANDWIDTH  # both overlap
        step_time = max(matmuls, shared, requested / (device.cache * CACHE_RATE), LATENCY / (self.stages - 1))
        stored = self.m * self.n * STORED + LATENCY
        if self.ping_pong:
            stored *= HIDDEN
        return math.log(steps * step_time + waves * stored)

    def estimate_busiest(self, tiles: int, at_once: int, steps: int) -> tuple[int, int]:
        """Return the tiles of the busiest block, and its steps with the cost of partial tiles, as `Grid.distribute`
        does.
        """
        waves = -(-tiles // at_once)
        splits = max(min(at_once // tiles, steps // self.split_steps), 1)
        split = waves * -(-steps // splits) + (self.split_steps if splits > 1 else 0)
        return waves, min(split, -(-tiles * steps // at_once) + 2 * self.split_steps)

    @classmethod
    def default(cls, problem: MatmulShape, device: Device) -> WgmmaMatmulTiles:
        """Return untuned but good tiles.

        They are CUTLASS's cooperative 128 x 256 x 64 in clusters of two; or its ping-pong of 64 x 256, where k is so
        short that stores take longer than larger tiles save; or smaller ones, where that would leave the GPU idle.
        """
        many = dataclasses.replace(
            problem, rows=problem.rows or 1 << 20, columns=problem.columns or 1 << 20, depth=problem.depth or 1 << 20
        )
        rows, columns = many.rows or 0, (many.columns or 0) * problem.matmuls

        def tiles(m: int, n: int) -> int:
            return (problem.batch or 1) * -(-rows // m) * -(-columns // n)

        if tiles(128, 256) >= device.sm_count and columns > 128 * problem.matmuls:
            cooperative = WgmmaMatmulTiles(2, 256, 4, 232, 40, split_steps=10, cluster=2)
            alternating = dataclasses.replace(cooperative, stages=5, ping_pong=True)
            return min(cooperative, alternating, key=lambda candidate: candidate.estimate(many, device))
        narrow = cls.narrow()
        return narrow if rows > 64 else dataclasses.replace(narrow, consumers=1, consumer_registers=200)

    @classmethod
    def narrow(cls) -> WgmmaMatmulTiles:
        """Return tiles for sizes with fewer large tiles than SMs."""
        return WgmmaMatmulTiles(2, 128, 6, 160, 24)

    @classmethod
    def low(cls, problem: MatmulShape) -> WgmmaMatmulTiles:
        """Return tiles for up to 64 rows: split-K with many splits, so that each SM reads its share of B.

        On an H200 they are 16 to 28 % faster than the small-M kernel with 32 or 64 rows.
        """
        return cls(1, 64 * problem.matmuls, 6, 200, 24, split_steps=4)

    @classmethod
    def for_runs(cls) -> tuple[WgmmaMatmulTiles, WgmmaMatmulTiles]:
        """Return tiles for rows that choose their matrices, for long runs and for short ones.

        The tiles are low, because runs end anywhere.
        """
        return cls(2, 256, 5, 232, 40, ping_pong=True), cls(2, 128, 6, 160, 24, ping_pong=True)


def _is_power(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0
