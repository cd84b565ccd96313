"""Tiles of the CUDA kernel for small-M matmuls (small_m_matmul.py)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from ..tiles import Space, Tiles
from .cycles import TYPICAL, resident_blocks
from .device import Device
from .matmul_reader import Shape


@dataclass(frozen=True)
class RowsTiming:
    """What `SmallMTiles.estimate` takes for granted. Fitted to timings of an H200 (benchmarks/gpu/tile_models.py)."""

    launch: float = 3000
    """Cycles of a launch."""
    enough: float = 34000
    """Bytes that an SM should have on their way."""
    shortage: float = 0.18
    """What it costs, of the time, to have half of that ..."""
    surplus: float = 0.16
    """... or twice as much, in one wave of blocks, but for what is asked for before the loop."""
    short_strides: float = 0.04
    """To ask for half of 2048 values of k at a time, in many waves."""
    few_warps: float = 0.043
    """To have half of 16 warps, in many waves."""
    last_wave: float = 0.135
    """For the share of the last wave that is empty."""
    alone: float = 0.285
    """For blocks of 128 KiB of which an SM holds one at a time."""


_SMALL_M_REGISTERS = 40  # of a thread, for 8 rows and one GEMM: shared memory limits blocks before these do


@dataclass(frozen=True)
class SmallMTiles(Tiles):
    """Tiles of `small_m_matmul`."""

    warps: int
    """Warps per block, which share k."""
    ahead: int
    """Chunks of k that each of its threads has on their way, of each row."""
    rows: int = 8
    """The most rows that the kernel is for; more go to the next."""

    TIMING: ClassVar = RowsTiming()

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    def pieces(self, c: int) -> int:
        """Pieces of c chunks that are on their way."""
        return max(self.ahead // c, 1)

    def places(self, matmuls: int, c: int) -> int:
        """Of 16 bytes that a thread has in shared memory; where B is codes, c chunks of it are one place."""
        return self.pieces(c) * (2 * matmuls + self.rows // 8 * c)

    @classmethod
    def space(cls, problem: Shape, device: Device) -> Space:
        return {"warps": (2, 4, 8, 16), "ahead": (2, 4, 8, 16), "rows": (8, 16, 32, 64)}

    def rules(self, problem: Shape, device: Device) -> dict[str, bool]:
        shared = self.shared_memory(problem)
        return {
            f"warps = {self.warps} must be from 1 to 32": 1 <= self.warps <= 32,
            f"ahead = {self.ahead} must be positive": self.ahead > 0,
            f"rows = {self.rows} must be a multiple of 8 up to 64": self.rows in range(8, 65, 8),
            f"{shared} bytes of shared memory are more than {device.shared_memory}": shared <= device.shared_memory,
            "the sums leave no registers": self.rows // 2 * problem.matmuls <= 128,
        }

    def shared_memory(self, shape: Shape) -> int:
        """Bytes per block: what is on its way, and in its place the warps' sums of 16 columns of each matmul, 20
        apart."""
        sums = 4 * self.warps * 20 * self.rows * shape.matmuls
        return max(16 * self.threads * self.places(shape.matmuls, shape.chunks), sums)

    def estimate(self, problem: Shape, device: Device, timing: RowsTiming = TIMING) -> float:
        """Reading B, which takes longer by what tiles waste of the rate of memory."""
        columns, depth = problem.columns or TYPICAL, problem.depth or TYPICAL
        each = (problem.batch or 1) * -(-columns // 16) / device.sm_count
        size = problem.type.bytes * depth * 16 * problem.matmuls  # of a block
        at_once = resident_blocks(device, self.threads, _SMALL_M_REGISTERS, self.shared_memory(problem))
        stride = self.warps * self.ahead * 4 * problem.type.chunk  # of k: what a block asks for at a time
        in_flight = min(max(each, 1), at_once) * size * min(stride / depth, 1)
        waves = each / at_once
        wasted = timing.shortage * max(math.log2(timing.enough / in_flight), 0)
        if each <= 2.5:  # one wave, in which all blocks keep step
            rest = max(1 - 2 * stride / depth, 0)
            wasted += timing.surplus * rest * max(math.log2(in_flight / timing.enough), 0)
        else:
            wasted += timing.short_strides * math.log2(max(2048 / min(stride, depth), 1))
            wasted += timing.few_warps * math.log2(16 / self.warps) * (at_once > 1)
        if waves > 1:
            wasted += timing.last_wave * (math.ceil(waves) / waves - 1)
            wasted += timing.alone * (at_once == 1) * (131072 / size) ** 4
        return math.log(timing.launch + each * size / device.memory) + wasted

    @classmethod
    def default(cls, problem: Shape, device: Device) -> SmallMTiles:
        """Return the tiles for up to 8 rows with the best estimate, of those that have enough of B on its way."""
        tiles = [SmallMTiles(warps, ahead) for warps, ahead in ((8, 8), (16, 4), (4, 8), (16, 2), (8, 4), (8, 2))]
        many = dataclasses.replace(problem, columns=problem.columns or 1 << 20)
        return min((each.fitting(problem, device) for each in tiles), key=lambda each: each.estimate(many, device))

    @classmethod
    def several(cls, problem: Shape, device: Device, rows: int) -> SmallMTiles:
        """Return the tiles for up to 16 or 32 rows: what an H200 is fastest with, or within 5 % of it.

        16 warps keep enough on its way. Of 16 rows 8 warps with more ahead are faster where all blocks are one wave, or
        many; of 32 rows of two GEMMs they leave room for a second block. Quantized weights come in pieces of up to
        four chunks, which have to be there at once.
        """
        each = (problem.batch or 1) * -(-(problem.columns or 1 << 20) // 16) / device.sm_count
        if problem.chunks > 1:
            tiles = SmallMTiles(8, 4, rows)
        elif rows > 16:
            tiles = SmallMTiles(16 if problem.matmuls == 1 else 8, 2, rows)
        elif problem.matmuls == 1 and not 1.1 < each < 2.5:
            tiles = SmallMTiles(8, 8, rows)
        else:
            tiles = SmallMTiles(16, 2, rows)
        return tiles.fitting(problem, device)

    def fitting(self, problem: Shape, device: Device) -> SmallMTiles:
        """With less on its way, where there is no room for so much."""
        tiles = self
        while tiles.ahead > 1 and tiles.shared_memory(problem) > device.shared_memory:
            tiles = dataclasses.replace(tiles, ahead=tiles.ahead // 2)
        return tiles
