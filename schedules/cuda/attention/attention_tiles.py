"""Tiles of the CUDA attention kernels for many query rows, and rules that all attention kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    SHARED_BANDWIDTH,
    TYPICAL_SIZE,
    mma_sync_rate,
    spread_blocks,
    step_cycles,
)
from ..primitives.device import Device
from ..primitives.shared_tile import CHUNK

REGISTERS = 255
"""The number of registers that a thread can have."""

ADDRESSES = 64
"""Registers of a thread besides its accumulators."""


@dataclass(frozen=True)
class MmaTiles(Tiles):
    """Tiles of `prefill_mma`."""

    q: int
    """Query rows per block: B_r in the paper. 16 or 32 per warp."""
    kv: int
    """Keys per tile: B_c in the paper. Multiple of 16."""
    warps: int
    """Warps per block; each has q / warps rows of its own."""
    stages: int = 1
    """Tiles of K, and of V, in shared memory.

    With one stage, a tile of K arrives during P V, and one of V during Q K^T. For a quantized cache these are the tiles
    in flight; one more tile holds the dequantized values.
    """
    q_in_registers: bool = False
    """Whether Q_i stays in registers. Otherwise it is read from shared memory for every tile of keys."""
    split: int = 512
    """Keys are split to keep the GPU busy, into ranges of at least so many keys of the cache."""

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    @property
    def row_blocks(self) -> int:
        """Blocks of 16 query rows per warp."""
        return self.q // (16 * self.warps)

    def shared_memory(self, problem: AttentionProblem) -> int:
        """Return the bytes per block.

        They cover Q_i, whose memory Y_i reuses, the stages of K and V, and the dequantized tiles.
        """
        d, dv = pad_head_dim(problem.head_dim), problem.v_head_dim
        dequantized = 2 * CHUNK if problem.is_quantized else 0
        chunk_bytes = self.stages * staged_chunk_bytes(problem) + dequantized
        return 2 * self.q * max(d, dv) + self.kv * (d + dv) // CHUNK * chunk_bytes

    def registers(self, problem: AttentionProblem) -> int:
        """Return the registers of a thread for O, S and, if it stays there, Q.

        Addresses, operands, m and l come on top.
        """
        o, s = problem.v_head_dim // 2, self.kv // 2
        q = pad_head_dim(problem.head_dim) // 4 if self.q_in_registers else 0
        return self.row_blocks * (o + s + q)

    @classmethod
    def space(cls, problem: AttentionProblem, device: Device) -> Space:
        return {
            "q": (16, 32, 64, 128, 256),
            "kv": (16, 32, 48, 64, 96, 128),
            "warps": (1, 2, 4, 8),
            "stages": (1, 2, 3),
            "q_in_registers": (False, True),
            "split": (256, 512, 1024),
        }

    def rules(self, problem: AttentionProblem, device: Device) -> dict[str, bool]:
        shared, accumulators = self.shared_memory(problem), self.registers(problem)
        return {
            f"warps = {self.warps} must be from 1 to 16": 1 <= self.warps <= 16,
            f"q = {self.q} must be 16 or 32 times warps = {self.warps}": self.q in (16 * self.warps, 32 * self.warps),
            f"kv = {self.kv} must be a multiple of 16": self.kv > 0 and self.kv % 16 == 0,
            f"stages = {self.stages} must be positive": self.stages > 0,
            f"split = {self.split} must be positive": self.split > 0,
            f"{shared} bytes of shared memory must fit {device.shared_memory}": shared <= device.shared_memory,
            f"{accumulators} accumulators must fit {REGISTERS} registers": accumulators + 32 <= REGISTERS,
        }

    def estimate(self, problem: AttentionProblem, device: Device) -> float:
        """Estimate the time by the key tiles of the busiest SM.

        Matmuls, softmax, shared memory and cache overlap. A warp's waiting is added where no other block hides it.
        """
        d, dv = pad_head_dim(problem.head_dim), problem.v_head_dim
        chunks = self.kv * (d + dv) // CHUNK
        tile, staged = 2 * CHUNK * chunks, staged_chunk_bytes(problem) * chunks
        rate = mma_sync_rate(device)
        matmuls = 2 * self.q * self.kv * (d + dv) / rate
        softmax = self.q * self.kv / EXPONENTIALS + self.q * dv / LANES  # which rescales O for each tile
        dequantization, moved_bytes = (
            (EXPANSION * CHUNK * chunks / LANES, 2 * staged + tile) if problem.is_quantized else (0, tile)
        )
        operands = self.warps * tile + (0 if self.q_in_registers else 2 * self.q * d)
        units = max(
            matmuls, softmax + dequantization, (moved_bytes + operands) / SHARED_BANDWIDTH, staged / device.cache
        )
        own_cycles = (matmuls + softmax + dequantization) * 4 / min(self.warps, 4)  # a warp has a quarter of the units
        hidden_cycles = own_cycles / 2 if self.stages == 1 else (self.stages - 1) * own_cycles
        registers = self.registers(problem) + ADDRESSES
        tiles = _row_blocks(problem, self.q)
        splits = _splits(problem, tiles, self.split, device)
        sm_load = spread_blocks(
            tiles * splits, device, self.threads, min(registers, REGISTERS), self.shared_memory(problem)
        )
        tile_cycles = step_cycles(units, own_cycles + max(LATENCY - hidden_cycles, 0.0) + 2 * BARRIER, sm_load.at_once)
        spilled = max(registers - REGISTERS, 0) / REGISTERS
        keys = _key_tiles(problem, self.q, self.kv) / splits
        return math.log(sm_load.blocks * (keys * tile_cycles * (1 + spilled) + LATENCY) + _merging(splits))

    @classmethod
    def default(cls, problem: AttentionProblem, device: Device) -> MmaTiles:
        """Return untuned but good tiles.

        They are those that FlashAttention-2 publishes for these head sizes (flash_fwd_launch_template.h), with fewer
        keys where nvcc would spill a register or two. Quantized caches have tiles of their own.
        """
        tiles = MmaTiles._published(problem, device)
        while tiles.shared_memory(problem) > device.shared_memory:
            tiles = replace(tiles, kv=tiles.kv - 16)
        return tiles

    @staticmethod
    def _published(problem: AttentionProblem, device: Device) -> MmaTiles:
        dim = max(pad_head_dim(problem.head_dim), problem.v_head_dim)
        small = device.shared_memory < 128 << 10
        causal, two_ended = problem.is_causal, problem.has_left_bound
        if problem.is_quantized and dim <= 96:
            return MmaTiles(q=128, kv=48, warps=4)
        if problem.is_quantized:  # with more warps, each dequantizes less and has registers left for it
            return MmaTiles(q=128, kv=64 if dim <= 128 else 32, warps=8)
        if dim <= 64:
            return MmaTiles(q=128, kv=64, warps=4)
        if dim <= 128 and small and causal:
            return MmaTiles(q=64, kv=48 if dim > 96 or two_ended else 64, warps=4)
        if dim <= 96:
            return MmaTiles(q=128, kv=48 if dim > 80 and (two_ended or problem.has_additive_mask) else 64, warps=4)
        if dim <= 128:
            return MmaTiles(q=128, kv=32, warps=4)
        return MmaTiles(q=64, kv=64, warps=4) if small else MmaTiles(q=128, kv=64, warps=8)


@dataclass(frozen=True)
class WgmmaTiles(Tiles):
    """Tiles of `prefill_wgmma`, and the distribution of a block's registers."""

    consumers: int
    """Warpgroups that compute, 64 query rows each: 1 to 3."""
    kv: int
    """Keys per tile: B_c in the paper. Multiple of 16."""
    consumer_registers: int
    """Registers per thread of a consumer: the same multiple of 8 for all consumers."""
    producer_registers: int
    """Registers per thread of the producer, which computes nothing."""
    stages: int = 2
    """Tiles of K, and of V, in shared memory."""
    ping_pong: bool = True
    """Whether consumers alternate at the tensor cores, so that the softmax of one overlaps the matmuls of another."""
    y_apart: bool = False
    """Whether Y_i has shared memory of its own, so that the next Q can arrive meanwhile. Otherwise it reuses that of
    Q_i.
    """
    split: int = 512
    """Keys are split to keep the GPU busy, into ranges of at least so many keys of the cache."""
    blocks: int | None = None
    """Maximum number of blocks of the grid, to leave SMs to other kernels. None uses all SMs of the GPU."""

    @property
    def q(self) -> int:
        """Query rows per block: B_r in the paper."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 128 * (self.consumers + 1)

    def shared_memory(self, problem: AttentionProblem) -> int:
        """Return the bytes per block: Q_i and Y_i, the stages of K and V, barriers and marks."""
        d, dv = (-(-n // 64) * 128 for n in (problem.head_dim, problem.v_head_dim))
        return (
            self.q * (d + dv if self.y_apart else max(d, dv))
            + self.stages * self.kv * (d + dv)
            + 1024 * (1 + self.stages * self.kv // 256)
        )

    @classmethod
    def space(cls, problem: AttentionProblem, device: Device) -> Space:
        return {
            "consumers": (1, 2, 3),
            "kv": (32, 48, 64, 80, 96, 112, 128, 160, 192),
            "consumer_registers": (160, 168, 200, 240),
            "producer_registers": (24, 32, 40),
            "stages": (2, 3, 4),
            "ping_pong": (False, True),
            "y_apart": (False, True),
            "split": (256, 512, 1024),
            "blocks": (None,),
        }

    def rules(self, problem: AttentionProblem, device: Device) -> dict[str, bool]:
        shared = self.shared_memory(problem)
        threads = self.consumers + 1
        at_launch = 65536 // (128 * threads) // 8 * 8
        used_registers = self.consumers * self.consumer_registers + self.producer_registers
        accumulators = problem.v_head_dim // 2 + self.kv // 2 + self.kv // 4
        counts = (self.consumer_registers, self.producer_registers)
        return {
            f"consumers = {self.consumers} must be 1, 2 or 3": self.consumers in (1, 2, 3),
            f"kv = {self.kv} must be a multiple of 16 up to 256": self.kv in range(16, 257, 16),
            f"stages = {self.stages} must be at least 2": self.stages >= 2,
            f"split = {self.split} must be positive": self.split > 0,
            f"{counts} registers must be multiples of 8 from 24 to 256": all(n in range(24, 257, 8) for n in counts),
            f"{used_registers} registers per thread of each warpgroup must be at most {at_launch * threads}": (
                used_registers <= at_launch * threads
            ),
            f"{shared} bytes of shared memory must fit {device.shared_memory}": shared <= device.shared_memory,
            f"{accumulators} accumulators must fit {self.consumer_registers} registers": (
                accumulators + 24 <= self.consumer_registers
            ),
        }

    def estimate(self, problem: AttentionProblem, device: Device) -> float:
        """Estimate the time as `MmaTiles` does.

        Here consumers share all units, alternating or overlapping by chance, and copies are `stages` ahead.
        """
        d, dv = pad_head_dim(problem.head_dim), problem.v_head_dim
        tile = 2 * self.kv * (d + dv)
        matmuls = 2 * self.q * self.kv * (d + dv) / device.tensor_cores
        softmax = self.q * self.kv / EXPONENTIALS + self.q * dv / LANES  # which rescales O for each tile
        operands = self.consumers * (tile + 2 * 64 * d)
        units = max(matmuls, softmax, (tile + operands) / SHARED_BANDWIDTH, tile / device.cache)
        own_cycles = (matmuls + softmax) / self.consumers + 2 * BARRIER  # of a consumer, which can use all units
        alternating = max(units, own_cycles)
        overlapping = (alternating + matmuls + softmax) / 2  # consumers overlap by chance
        tile_cycles = max(
            alternating if self.ping_pong and self.consumers > 1 else overlapping, LATENCY / (self.stages - 1)
        )
        group = count_packed_heads(problem)
        tiles = _row_blocks(problem, self.q, group)
        splits = _splits(problem, tiles, self.split, device)
        blocks = -(-tiles * splits // device.sm_count)
        keys = _key_tiles(problem, self.q // group, self.kv) / splits
        return math.log(blocks * (keys * tile_cycles + LATENCY * (1 if self.y_apart else 2)) + _merging(splits))

    @classmethod
    def default(cls, problem: AttentionProblem, device: Device) -> WgmmaTiles:
        """Return untuned but good tiles.

        They are those that FlashAttention-3 publishes for these head sizes (hopper/tile_size.h), as far as nvcc keeps
        them in registers. tests/cuda/audits/test_machine_code.py checks that for every kind of problem.
        """
        dim = max(problem.head_dim, problem.v_head_dim)
        plain = not problem.has_mask and not problem.softcap and problem.score is None
        if dim <= 64 and plain:
            return WgmmaTiles(3, 96 if problem.has_left_bound else 128, 160, 32, y_apart=True)
        if dim <= 96:  # mask blocks have 128 keys: tiles across two of them are hidden less often
            masked = problem.has_formula and not problem.softcap
            return WgmmaTiles(2, 128 if plain or masked else 112, 232, 40, y_apart=True)
        if dim <= 128:
            return WgmmaTiles(2, 128 if plain else 96, 240, 24, y_apart=True)
        keys = 80 if plain else 32 if problem.has_formula else 48 if problem.has_mask else 64
        return WgmmaTiles(2, keys, 232, 40, ping_pong=False)


def count_packed_heads(problem: AttentionProblem) -> int:
    """Return how many query heads have their rows in one tile of `prefill_wgmma`.

    These are all heads that share keys, so that keys are read once. That needs 64 rows to be whole query rows, and no
    computed mask that distinguishes heads; otherwise 1.
    """
    return 1 if problem.has_formula_per_head or 64 % problem.group else problem.group


def pad_head_dim(head_dim: int) -> int:
    """Return the length of the dot products of Q K^T on tensor cores, which take 16 elements at a time."""
    return -(-head_dim // 16) * 16


def _row_blocks(problem: AttentionProblem, q: int, group: int = 1) -> int:
    """Return the number of blocks of q query rows over all heads, where `group` heads are packed."""
    return (problem.batch or 1) * problem.q_heads // group * -(-(problem.q_len or TYPICAL_SIZE) * group // q)


def _splits(problem: AttentionProblem, tiles: int, min_keys: int, device: Device) -> int:
    """Return the number of ranges of at least `min_keys` keys into which the kernels split the keys.

    `tiles` is the number of blocks of query rows.
    """
    return max(min(device.sm_count // tiles, -(-(problem.kv_len or TYPICAL_SIZE) // min_keys)), 1)


def _merging(splits: int) -> int:
    """Return the cycles until partial results are merged."""
    return LAUNCH + LATENCY if splits > 1 else 0


def _key_tiles(problem: AttentionProblem, q: int, kv: int) -> float:
    """Return the average number of tiles of kv keys for a block of q query rows.

    Under a causal mask about half of them lie below the diagonal.
    """
    keys = problem.kv_len or TYPICAL_SIZE
    all_tiles = -(-keys // kv)
    return min(all_tiles, (keys + q) / (2 * kv) + 0.5) if problem.is_causal else all_tiles
