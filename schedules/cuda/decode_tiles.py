"""Tiles of the CUDA kernels for few query rows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from lowering.attention.problem import AttentionProblem

from ..tiles import Space, Tiles
from .attention_tiles import ADDRESSES, REGISTERS, packed_heads, padded
from .cycles import BARRIER, EXPANSION, EXPONENTIALS, LANES, LATENCY, LAUNCH, TYPICAL, Waves, load, resident_blocks
from .device import Device
from .kv_codes import arriving_bytes
from .shared_tile import CHUNK


@dataclass(frozen=True)
class DecodeTiming:
    """Cycles that `DecodeTiles.estimate` takes for granted: fitted to an H200 (benchmarks/gpu/tile_models.py)."""

    launch: float = 4600
    """Of a launch, and of what a block does once."""
    latency: float = 530
    """Until a tile that a warp asked for is there, where nothing else is on its way."""
    own: float = 2.9
    """A warp's work on a tile, by what tensor cores and exponentials take."""
    block: float = 5800
    """A block's work that its warps share: queries, and what becomes of their sums."""
    merge: float = 5400
    """Of the second launch ..."""
    part: float = 210
    """... for each split."""
    uneven: float = 0.16
    """See `Waves.cycles`."""


TYPICAL_CACHES = ((1, 1024), (1, 4096), (1, 16384), (8, 4096), (64, 4096))
"""Batches and keys for which defaults are chosen."""


@dataclass(frozen=True)
class DecodeTiles(Tiles):
    """Tiles of `decode`."""

    keys: int
    """Keys per tile of a warp: B_c. Multiple of 16."""
    warps: int
    """Warps per block; each has every warps-th tile of a split, and a row where parts are put together."""
    stages: int
    """Tiles of K and V of a warp in shared memory, all but one of which are on their way."""
    split: int
    """Sequences are split to keep the GPU busy, but into parts of at least so many keys of the cache."""
    per_sm: int = 2
    """Thread blocks that keep each SM busy."""
    blocks: int | None = None
    """Thread blocks in all, where some SMs are for others; None is those of all that the GPU has."""
    rows: int = 64
    """The most packed query rows that the kernel is for: every 16 read K and V again, from the second-level cache."""
    ahead: int = 4
    """Parts of a row whose O a warp asks for at once where it puts them together."""

    TIMING: ClassVar = DecodeTiming()

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    def shared_memory(self, problem: AttentionProblem) -> int:
        """Bytes per block: 16 rows of Q and the stages, or m, l and O of the warps in their place. Of codes a warp has
        room for a tile of what they become, of K and then of V."""
        d, dv = padded(problem.head_dim), problem.v_head_dim
        expanded = 2 * self.keys * max(d, dv) if problem.coded else 0
        arriving = self.stages * self.keys * (d + dv) // CHUNK * arriving_bytes(problem)
        return max(2 * 16 * d + self.warps * (arriving + expanded), 4 * self.warps * 16 * (2 + 8 + dv))

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
            f"{shared} bytes of shared memory are more than {device.shared_memory}": shared <= device.shared_memory,
        }

    def estimate(self, problem: AttentionProblem, device: Device, timing: DecodeTiming = TIMING) -> float:
        """Reading the keys in waves of blocks, whose warps wait for tiles or work on them; and merging the splits."""
        d, dv, keys = padded(problem.head_dim), problem.v_head_dim, problem.kv_len or TYPICAL
        rows = problem.group * (problem.q_len or 1)
        blocks = (problem.batch or 1) * problem.kv_heads * -(-rows // 16)
        wanted = self.blocks or self.per_sm * device.sm_count
        splits = max(min(wanted // blocks, -(-keys // self.split)), 1)
        key = (d + dv) // CHUNK * arriving_bytes(problem)
        registers = min(dv // 2 + self.keys // 2 + ADDRESSES, REGISTERS)
        fit = resident_blocks(device, self.threads, registers, self.shared_memory(problem))
        unit = self.keys * self.warps
        steps = math.ceil(math.ceil(keys / unit) / splits)
        own = 4 * 16 * self.keys * (2 * (d + dv) / device.tensor_cores + 1 / EXPONENTIALS)
        if problem.coded:
            own += 4 * EXPANSION * self.keys * (d + dv) / LANES
        own = timing.own * own + (7 if problem.coded else 4) * BARRIER
        alone = steps * max(own, (timing.latency + own) / (self.stages - 1))
        read = Waves(blocks * splits, fit, device).cycles(keys / splits * key, alone, timing.uneven)
        merged = timing.merge + timing.part * splits if splits > 1 else 0
        return math.log(timing.launch + timing.block / self.warps + read + merged)

    @classmethod
    def default(cls, problem: AttentionProblem, device: Device) -> DecodeTiles:
        """Return the tiles whose estimates are best over caches of typical sizes.

        `prefill_wgmma` splits keys too, and reads them once for 64 rows of all heads that share them: where it can, it
        has all that need more than one tile of 16.
        """
        wide = device.generation == 90 and problem.dense and packed_heads(problem) == problem.group
        rows = 64 if problem.splits or not wide else 16
        keys = 32 if padded(problem.head_dim) + problem.v_head_dim <= 128 else 16
        typical = [dataclasses.replace(problem, batch=b, kv_len=n, q_len=1) for b, n in TYPICAL_CACHES]
        candidates = [
            DecodeTiles(keys, warps, stages, split=128, per_sm=each, rows=rows)
            for each in (1, 2)
            for warps, stages in ((8, 2), (4, 4), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2))
        ]
        legal = [tiles for tiles in candidates if tiles.is_legal(problem, device)]
        return min(legal, key=lambda tiles: sum(tiles.estimate(p, device) for p in typical))


@dataclass(frozen=True)
class RowTiles(Tiles):
    """Tiles of `decode_rows`."""

    split: int
    """Keys are split to keep the GPU busy, but into parts of at least so many keys of the cache."""
    per_sm: int = 32
    """Warps that keep each SM busy: half of what it can hold."""
    warps: int | None = None
    """Warps in all, where some SMs are for others; None is those of all that the GPU has."""
    block: int = 4
    """Warps per thread block."""
    keys: int = 4
    """Keys that a warp asks for at once."""
    ahead: int = 4
    """Parts of a row whose O a warp asks for at once where it puts them together."""

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
        least = min(self.split, self.per_sm, self.keys, self.ahead)
        return {
            "split, per_sm, keys and ahead must be positive": least > 0,
            f"block = {self.block} must be from 1 to 32": 1 <= self.block <= 32,
        }

    def estimate(self, problem: AttentionProblem, device: Device) -> float:
        """Waiting for keys, which so many warps do at once, or the cache that they read; and merging the splits."""
        keys = problem.kv_len or TYPICAL
        rows = (problem.batch or 1) * problem.q_heads * (problem.q_len or 1)
        wanted = self.warps or self.per_sm * device.sm_count
        splits = max(min(wanted // rows, -(-keys // self.split)), 1)
        busiest = load(-(-rows * splits // self.block), device, 32 * self.block, ADDRESSES, 0)
        size = 4 * (problem.head_dim + problem.v_head_dim)
        steps = -(-keys // (splits * self.keys))
        waited = steps * (LATENCY + self.keys * 2 * BARRIER) * busiest.blocks / busiest.at_once
        read = busiest.blocks * self.block * keys / splits * size / device.cache
        merged = LAUNCH + LATENCY * -(-splits // self.ahead) if splits > 1 else 0
        return math.log(max(waited, read) + merged)

    @classmethod
    def default(cls, problem: AttentionProblem, device: Device) -> RowTiles:
        """Untuned but good."""
        return RowTiles(split=16)
