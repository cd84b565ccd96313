"""Tiles of the CUDA kernels for few query rows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from lowering.attention.record.problem import AttentionProblem

from ...tiles import Space, Tiles
from ..cache.quantized_kv import staged_chunk_bytes
from ..primitives.cost_model import (
    BARRIER,
    EXPANSION,
    EXPONENTIALS,
    LANES,
    LATENCY,
    LAUNCH,
    TYPICAL_SIZE,
    Waves,
    count_resident_blocks,
    spread_blocks,
)
from ..primitives.device import Device
from ..primitives.shared_tile import CHUNK
from .attention_tiles import ADDRESSES, REGISTERS, count_packed_heads, pad_head_dim


@dataclass(frozen=True)
class DecodeTiming:
    """Cycles that `DecodeTiles.estimate` assumes, fitted to an H200 (benchmarks/gpu/tile_models.py)."""

    launch: float = 4600
    """Cycles of a launch, and of a block's one-time work."""
    latency: float = 530
    """Cycles until a tile that a warp loads arrives, where nothing else is in flight."""
    own: float = 2.9
    """Factor of a warp's work on a tile over the cycles of tensor cores and exponentials."""
    block: float = 5800
    """Cycles of a block's work that its warps share: loading queries and storing results."""
    merge: float = 5400
    """Cycles of the second launch."""
    part: float = 210
    """Additional cycles of the second launch for each split."""
    uneven: float = 0.16
    """See `Waves.cycles`."""


TYPICAL_CACHES = ((1, 1024), (1, 4096), (1, 16384), (8, 4096), (64, 4096))
"""Batches and key lengths for which defaults are chosen."""


@dataclass(frozen=True)
class DecodeTiles(Tiles):
    """Tiles of `decode`."""

    keys: int
    """Keys per tile of a warp: B_c. Multiple of 16."""
    warps: int
    """Warps per block. Each has every warps-th tile of a split, and a row when partial results are merged."""
    stages: int
    """Tiles of K and V of a warp in shared memory, all but one of which are in flight."""
    split: int
    """Sequences are split to keep the GPU busy, into ranges of at least so many keys of the cache."""
    per_sm: int = 2
    """Thread blocks that keep each SM busy."""
    blocks: int | None = None
    """Thread blocks in total, to leave SMs to other kernels. None uses all SMs of the GPU."""
    rows: int = 64
    """Maximum number of packed query rows. Every 16 rows read K and V again, from the second-level cache."""
    ahead: int = 4
    """Partial results of a row whose O a warp loads at once when merging."""

    TIMING: ClassVar = DecodeTiming()

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    def shared_memory(self, problem: AttentionProblem) -> int:
        """Return the bytes per block: 16 rows of Q and the stages, or m, l and O of the warps in the same memory.

        For a quantized cache, each warp has a dequantized tile, of K and then of V.
        """
        d, dv = pad_head_dim(problem.head_dim), problem.v_head_dim
        dequantized = 2 * self.keys * max(d, dv) if problem.is_quantized else 0
        staged = self.stages * self.keys * (d + dv) // CHUNK * staged_chunk_bytes(problem)
        return max(2 * 16 * d + self.warps * (staged + dequantized), 4 * self.warps * 16 * (2 + 8 + dv))

    @classmethod
    def space(cls, problem: AttentionProblem, device: Device) -> Space:
        return {
            "keys": (16, 32, 64),
            "warps": (1, 2, 4, 8),
            "stages": (2, 3, 4, 6),
            "split": (32, 64, 128, 256, 512, 1024),
            "per_sm": (1, 2, 3, 4),
            "blocks": (None,),
            "rows": (16, 32, 64, 128),
            "ahead": (1, 2, 4, 8),
        }

    def rules(self, problem: AttentionProblem, device: Device) -> dict[str, bool]:
        shared = self.shared_memory(problem)
        return {
            f"keys = {self.keys} must be a multiple of 16": self.keys > 0 and self.keys % 16 == 0,
            f"warps = {self.warps} must be from 1 to 32": 1 <= self.warps <= 32,
            f"stages = {self.stages} must be 2 or more": self.stages >= 2,
            "split, per_sm, rows and ahead must be positive": (min(self.split, self.per_sm, self.rows, self.ahead) > 0),
            f"{shared} bytes of shared memory must fit {device.shared_memory}": shared <= device.shared_memory,
        }

    def estimate(self, problem: AttentionProblem, device: Device, timing: DecodeTiming = TIMING) -> float:
        """Estimate the time to read the keys in waves of blocks, and to merge the splits.

        Warps wait for tiles or compute on them.
        """
        d, dv, keys = pad_head_dim(problem.head_dim), problem.v_head_dim, problem.kv_len or TYPICAL_SIZE
        rows = problem.group * (problem.q_len or 1)
        blocks = (problem.batch or 1) * problem.kv_heads * -(-rows // 16)
        target_blocks = self.blocks or self.per_sm * device.sm_count
        splits = max(min(target_blocks // blocks, -(-keys // self.split)), 1)
        key = (d + dv) // CHUNK * staged_chunk_bytes(problem)
        registers = min(dv // 2 + self.keys // 2 + ADDRESSES, REGISTERS)
        resident = count_resident_blocks(device, self.threads, registers, self.shared_memory(problem))
        unit = self.keys * self.warps
        steps = math.ceil(math.ceil(keys / unit) / splits)
        own_cycles = 4 * 16 * self.keys * (2 * (d + dv) / device.tensor_cores + 1 / EXPONENTIALS)
        if problem.is_quantized:
            own_cycles += 4 * EXPANSION * self.keys * (d + dv) / LANES
        own_cycles = timing.own * own_cycles + (7 if problem.is_quantized else 4) * BARRIER
        alone = steps * max(own_cycles, (timing.latency + own_cycles) / (self.stages - 1))
        read = Waves(blocks * splits, resident, device).cycles(keys / splits * key, alone, timing.uneven)
        merging = timing.merge + timing.part * splits if splits > 1 else 0
        return math.log(timing.launch + timing.block / self.warps + read + merging)

    @classmethod
    def default(cls, problem: AttentionProblem, device: Device) -> DecodeTiles:
        """Return the tiles whose estimates are best over caches of typical sizes.

        `prefill_wgmma` splits keys too, and reads them once for 64 rows of all heads that share them. Where it can run,
        it serves all problems that need more than one tile of 16.
        """
        wide = device.generation == 90 and problem.is_dense and count_packed_heads(problem) == problem.group
        rows = 64 if problem.splits or not wide else 16
        keys = 32 if pad_head_dim(problem.head_dim) + problem.v_head_dim <= 128 else 16
        typical = [dataclasses.replace(problem, batch=b, kv_len=n, q_len=1) for b, n in TYPICAL_CACHES]
        candidates = [
            DecodeTiles(keys, warps, stages, split=128, per_sm=per_sm, rows=rows)
            for per_sm in (1, 2)
            for warps, stages in ((8, 2), (4, 4), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2))
        ]
        legal = [tiles for tiles in candidates if tiles.is_legal(problem, device)]
        return min(legal, key=lambda tiles: sum(tiles.estimate(p, device) for p in typical))


@dataclass(frozen=True)
class RowTiles(Tiles):
    """Tiles of `decode_rows`."""

    split: int = 16
    """Keys are split to keep the GPU busy, into ranges of at least so many keys of the cache."""
    per_sm: int = 32
    """Warps that keep each SM busy: half of its capacity."""
    warps: int | None = None
    """Warps in total, to leave SMs to other kernels. None uses all SMs of the GPU."""
    block: int = 4
    """Warps per thread block."""
    keys: int = 4
    """Keys that a warp loads at once."""
    ahead: int = 4
    """Partial results of a row whose O a warp loads at once when merging."""

    @classmethod
    def space(cls, problem: AttentionProblem, device: Device) -> Space:
        return {
            "split": (8, 16, 32, 64, 128),
            "per_sm": (8, 16, 32, 64),
            "warps": (None,),
            "block": (1, 2, 4, 8),
            "keys": (1, 2, 4, 8),
            "ahead": (1, 2, 4, 8),
        }

    def rules(self, problem: AttentionProblem, device: Device) -> dict[str, bool]:
        smallest = min(self.split, self.per_sm, self.keys, self.ahead)
        return {
            "split, per_sm, keys and ahead must be positive": smallest > 0,
            f"block = {self.block} must be from 1 to 32": 1 <= self.block <= 32,
        }

    def estimate(self, problem: AttentionProblem, device: Device) -> float:
        """Estimate the time to wait for keys, or to read them from the cache, and to merge the splits."""
        keys = problem.kv_len or TYPICAL_SIZE
        rows = (problem.batch or 1) * problem.q_heads * (problem.q_len or 1)
        target_warps = self.warps or self.per_sm * device.sm_count
        splits = max(min(target_warps // rows, -(-keys // self.split)), 1)
        sm_load = spread_blocks(-(-rows * splits // self.block), device, 32 * self.block, ADDRESSES, 0)
        size = 4 * (problem.head_dim + problem.v_head_dim)
        steps = -(-keys // (splits * self.keys))
        waiting = steps * (LATENCY + self.keys * 2 * BARRIER) * sm_load.blocks / sm_load.at_once
        read = sm_load.blocks * self.block * keys / splits * size / device.cache
        merging = LAUNCH + LATENCY * -(-splits // self.ahead) if splits > 1 else 0
        return math.log(max(waiting, read) + merging)
