"""Tiles of the CUDA kernel for small-M matmuls (small_m_matmul.py)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from ...tiles import Space, Tiles
from ..primitives.cost_model import TYPICAL_SIZE, count_resident_blocks
from ..primitives.device import Device
from .matmul_reader import MatmulShape


@dataclass(frozen=True)
class SmallMTiming:
    """Constants of `SmallMTiles.estimate`, fitted to timings of an H200 (benchmarks/gpu/tile_models.py)."""

    launch: float = 3000
    """Cycles of a launch."""
    enough: float = 34000
    """Bytes that an SM should have in flight."""
    shortage: float = 0.18
    """Fraction of the time lost with half of that in flight."""
    surplus: float = 0.16
    """Fraction of the time lost with twice as much, in one wave of blocks, except for loads before the loop."""
    short_strides: float = 0.04
    """Fraction of the time lost by loading half of 2048 values of k at a time, in many waves."""
    few_warps: float = 0.043
    """Fraction of the time lost with half of 16 warps, in many waves."""
    last_wave: float = 0.135
    """Fraction of the time lost for the empty share of the last wave."""
    alone: float = 0.285
    """Fraction of the time lost for blocks of 128 KiB of which one fits on an SM at a time."""


_SMALL_M_REGISTERS = 40  # of a thread, for 8 rows and one GEMM: shared memory is exhausted before these are


@dataclass(frozen=True)
class SmallMTiles(Tiles):
    """Tiles of `small_m_matmul`."""

    warps: int
    """Warps per block, which share k."""
    ahead: int
    """Chunks of k that each of its threads has in flight, of each row."""
    rows: int = 8
    """Maximum number of rows of the kernel; the next kernel serves more."""

    TIMING: ClassVar = SmallMTiming()

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    def slices(self, c: int) -> int:
        """Return the k-slices of c chunks that are in flight."""
        return max(self.ahead // c, 1)

    def slots(self, matmuls: int, c: int) -> int:
        """Return the slots of 16 bytes of a thread in shared memory; where B is quantized, c chunks of it take one
        slot.
        """
        return self.slices(c) * (2 * matmuls + self.rows // 8 * c)

    @classmethod
    def space(cls, problem: MatmulShape, device: Device) -> Space:
        return {"warps": (2, 4, 8, 16), "ahead": (2, 4, 8, 16), "rows": (8, 16, 32, 64)}

    def rules(self, problem: MatmulShape, device: Device) -> dict[str, bool]:
        shared = self.shared_memory(problem)
        return {
            f"warps = {self.warps} must be from 1 to 32": 1 <= self.warps <= 32,
            f"ahead = {self.ahead} must be positive": self.ahead > 0,
            f"rows = {self.rows} must be a multiple of 8 up to 64": self.rows in range(8, 65, 8),
            f"{shared} bytes of shared memory must fit {device.shared_memory}": shared <= device.shared_memory,
            "the sums leave no registers": self.rows // 2 * problem.matmuls <= 128,
        }

    def shared_memory(self, shape: MatmulShape) -> int:
        """Return the bytes per block: the k-slices in flight, or in the same memory the accumulators of the warps.

        These have 16 columns of each matmul, with a pitch of 20.
        """
        accumulators = 4 * self.warps * 20 * self.rows * shape.matmuls
        return max(16 * self.threads * self.slots(shape.matmuls, shape.chunks), accumulators)

    def estimate(self, problem: MatmulShape, device: Device, timing: SmallMTiming = TIMING) -> float:
        """Estimate the time to read B, increased by the fraction of the memory bandwidth that the tiles waste."""
        columns, depth = problem.columns or TYPICAL_SIZE, problem.depth or TYPICAL_SIZE
        blocks_per_sm = (problem.batch or 1) * -(-columns // 16) / device.sm_count
        size = problem.type.bytes * depth * 16 * problem.matmuls  # of a block
        at_once = count_resident_blocks(device, self.threads, _SMALL_M_REGISTERS, self.shared_memory(problem))
        stride = self.warps * self.ahead * 4 * problem.type.chunk  # of k: values that a block loads at a time
        in_flight = min(max(blocks_per_sm, 1), at_once) * size * min(stride / depth, 1)
        waves = blocks_per_sm / at_once
        waste = timing.shortage * max(math.log2(timing.enough / in_flight), 0)
        if blocks_per_sm <= 2.5:  # one wave, in which all blocks run in step
            loop_share = max(1 - 2 * stride / depth, 0)
            waste += timing.surplus * loop_share * max(math.log2(in_flight / timing.enough), 0)
        else:
            waste += timing.short_strides * math.log2(max(2048 / min(stride, depth), 1))
            waste += timing.few_warps * math.log2(16 / self.warps) * (at_once > 1)
        if waves > 1:
            waste += timing.last_wave * (math.ceil(waves) / waves - 1)
            waste += timing.alone * (at_once == 1) * (131072 / size) ** 4
        return math.log(timing.launch + blocks_per_sm * size / device.memory) + waste

    @classmethod
    def default(cls, problem: MatmulShape, device: Device) -> SmallMTiles:
        """Return the tiles for up to 8 rows with the best estimate, of those that have enough of B in flight."""
        tiles = [SmallMTiles(warps, ahead) for warps, ahead in ((8, 8), (16, 4), (4, 8), (16, 2), (8, 4), (8, 2))]
        many = dataclasses.replace(problem, columns=problem.columns or 1 << 20)
        return min(
            (candidate.shrink_to_fit(problem, device) for candidate in tiles),
            key=lambda candidate: candidate.estimate(many, device),
        )

    @classmethod
    def several(cls, problem: MatmulShape, device: Device, rows: int) -> SmallMTiles:
        """Return the tiles for up to 16 or 32 rows that are the fastest on an H200, or within 5 % of it.

        16 warps have enough in flight. For 16 rows, 8 warps with more ahead are faster where all blocks are one wave,
        or many. For 32 rows of two GEMMs, 8 warps leave room for a second block. Quantized weights come in k-slices of
        up to four chunks, which must be in shared memory at once.
        """
        blocks_per_sm = (problem.batch or 1) * -(-(problem.columns or 1 << 20) // 16) / device.sm_count
        if problem.chunks > 1:
            tiles = SmallMTiles(8, 4, rows)
        elif rows > 16:
            tiles = SmallMTiles(16 if problem.matmuls == 1 else 8, 2, rows)
        elif problem.matmuls == 1 and not 1.1 < blocks_per_sm < 2.5:
            tiles = SmallMTiles(8, 8, rows)
        else:
            tiles = SmallMTiles(16, 2, rows)
        return tiles.shrink_to_fit(problem, device)

    def shrink_to_fit(self, problem: MatmulShape, device: Device) -> SmallMTiles:
        """Return tiles with fewer chunks in flight, where shared memory is too small."""
        tiles = self
        while tiles.ahead > 1 and tiles.shared_memory(problem) > device.shared_memory:
            tiles = dataclasses.replace(tiles, ahead=tiles.ahead // 2)
        return tiles
