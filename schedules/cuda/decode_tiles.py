"""Tiles of the CUDA kernels for few query rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowering.attention.problem import AttentionProblem

from ..tiles import Space, Tiles
from .attention_tiles import ADDRESSES, REGISTERS, packed_heads, padded
from .cycles import BARRIER, EXPANSION, EXPONENTIALS, LANES, LATENCY, LAUNCH, TYPICAL, load, reading
from .device import Device
from .kv_codes import arriving_bytes
from .shared_tile import CHUNK


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
    per_multiprocessor: int = 2
    """Thread blocks that keep each multiprocessor busy."""
    blocks: int | None = None
    """Thread blocks in all, where some multiprocessors are for others; None is those of all that the GPU has."""
    rows: int = 64
    """The most packed query rows that the kernel is for: every 16 read K and V again, from the second-level cache."""
    ahead: int = 4
    """Parts of a row whose O a warp asks for at once where it puts them together."""

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
            "per_multiprocessor": (1, 2, 3, 4),
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
            "split, per_multiprocessor, rows and ahead must be positive": (
                min(self.split, self.per_multiprocessor, self.rows, self.ahead) > 0
            ),
            f"{shared} bytes of shared memory are more than {device.shared_memory}": shared <= device.shared_memory,
        }

    def estimate(self, problem: AttentionProblem, device: Device) -> float:
        """Reading the keys with so many bytes on their way, or the warps' own work; and merging the splits."""
        d, dv, keys = padded(problem.head_dim), problem.v_head_dim, problem.kv_len or TYPICAL
        rows = problem.group * (problem.q_len or 1)
        blocks = (problem.batch or 1) * problem.kv_heads * -(-rows // 16)
        wanted = self.blocks or self.per_multiprocessor * device.multiprocessors
        splits = max(min(wanted // blocks, -(-keys // self.split)), 1)
        key = (d + dv) // CHUNK * arriving_bytes(problem)
        registers = min(dv // 2 + self.keys // 2 + ADDRESSES, REGISTERS)
        busiest = load(blocks * splits, device, self.threads, registers, self.shared_memory(problem))
        steps = -(-keys // (splits * self.keys * self.warps))
        in_flight = busiest.at_once * self.warps * (self.stages - 1) * self.keys * key
        read = reading(busiest.blocks * keys / splits * key, in_flight, device)
        own = 4 * 16 * self.keys * (2 * (d + dv) / device.tensor_cores + 1 / EXPONENTIALS) + 4 * BARRIER
        if problem.coded:
            own += 4 * EXPANSION * self.keys * (d + dv) / LANES + 3 * BARRIER
        waited = steps * own * busiest.blocks / busiest.at_once
        merged = LAUNCH + LATENCY * -(-splits // self.ahead) if splits > 1 else 0
        return math.log(max(read, waited) + LATENCY + merged)

    @classmethod
    def default(cls, problem: AttentionProblem, device: Device) -> DecodeTiles:
        """Untuned but good: two blocks on each multiprocessor, with as much of K and V on its way as there is room for.

        Bandwidth times latency is some 20 to 40 KB per multiprocessor. `prefill_wgmma` splits keys too, and reads them
        once for 64 rows of all heads that share them: where it can, it has all that need more than one tile of 16.
        """
        wide = device.generation == 90 and problem.dense and packed_heads(problem) == problem.group
        rows = 64 if problem.splits or not wide else 16
        keys = 32 if padded(problem.head_dim) + problem.v_head_dim <= 128 else 16
        for warps, stages in ((4, 4), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2)):
            tiles = DecodeTiles(keys, warps, stages, split=2 * keys * warps, rows=rows)
            if tiles.shared_memory(problem) <= device.shared_memory // 2:
                break
        return tiles


@dataclass(frozen=True)
class RowTiles(Tiles):
    """Tiles of `decode_rows`."""

    split: int
    """Keys are split to keep the GPU busy, but into parts of at least so many keys of the cache."""
    per_multiprocessor: int = 32
    """Warps that keep each multiprocessor busy: half of what it can hold."""
    warps: int | None = None
    """Warps in all, where some multiprocessors are for others; None is those of all that the GPU has."""
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
            "per_multiprocessor": (8, 16, 32, 64),
            "warps": (None,),
            "block": (1, 2, 4, 8),
            "keys": (1, 2, 4, 8),
            "ahead": (1, 2, 4, 8),
        }

    def rules(self, problem: AttentionProblem, device: Device) -> dict[str, bool]:
        least = min(self.split, self.per_multiprocessor, self.keys, self.ahead)
        return {
            "split, per_multiprocessor, keys and ahead must be positive": least > 0,
            f"block = {self.block} must be from 1 to 32": 1 <= self.block <= 32,
        }

    def estimate(self, problem: AttentionProblem, device: Device) -> float:
        """Waiting for keys, which so many warps do at once, or the cache that they read; and merging the splits."""
        keys = problem.kv_len or TYPICAL
        rows = (problem.batch or 1) * problem.q_heads * (problem.q_len or 1)
        wanted = self.warps or self.per_multiprocessor * device.multiprocessors
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
