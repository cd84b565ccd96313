"""A rough model of a GPU in cycles of its SMs, to rank tiles before anything is measured.

It orders a tuner's first candidates, so only differences between tiles of one problem matter. A kernel takes as long as
the SM with the most blocks. Blocks there share units of limited throughput (a roofline per step). A single block also
waits for its own results, which only other blocks hide.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device

EXPONENTIALS = 16
"""Exponentials of an SM per cycle."""

LANES = 128
"""Lanes of an SM for arithmetic in float32."""

EXPANSION = 3
"""Instructions that dequantize one value of a cache to half precision, roughly."""

SHARED_BANDWIDTH = 128
"""Bytes of shared memory that an SM reads or writes per cycle."""

LATENCY = 700
"""Cycles until a load from the device's memory, or from its cache, arrives."""

BARRIER = 40
"""Cycles of a barrier, or of an exchange between threads."""

LAUNCH = 3000
"""Cycles of one more launch."""

TYPICAL_SIZE = 1024
"""The value assumed for a symbolic size."""

SMOOTH = 3
"""How sharply two limits of a kernel meet: the exponent of the norm that combines them."""

CLOCK = 1.5e9
"""Cycles per second, roughly."""

_REGISTERS, _WARPS = 65536, 64  # of an SM
_RESERVED = 1024  # bytes of shared memory that a block takes besides its own


_WARP_INSTRUCTIONS = {90: 0.62, 100: 0.31}  # of the rate of tensor cores, where mma.sync cannot reach it


def mma_sync_rate(device: Device) -> float:
    """Return the operations of an SM per cycle in matmuls by mma.sync."""
    return device.tensor_cores * _WARP_INSTRUCTIONS.get(device.generation, 1.0)


@dataclass(frozen=True)
class SmLoad:
    """The load of the busiest SM: its blocks in total, and how many run at a time."""

    blocks: int
    at_once: int


def count_resident_blocks(device: Device, threads: int, registers: int, shared_memory: int) -> int:
    """Return how many blocks fit on an SM, by their threads, registers per thread and bytes of shared memory."""
    warps = -(-threads // 32)
    fit = min(
        _WARPS // warps,
        _REGISTERS // (warps * 32 * -(-registers // 8) * 8),
        (device.shared_memory + _RESERVED) // (shared_memory + _RESERVED),
    )
    return max(fit, 1)


def spread_blocks(blocks: int, device: Device, threads: int, registers: int, shared_memory: int) -> SmLoad:
    """Return the load of the busiest SM, by the threads, registers per thread and bytes of shared memory of a block."""
    busiest = -(-blocks // device.sm_count)
    return SmLoad(busiest, max(min(count_resident_blocks(device, threads, registers, shared_memory), busiest), 1))


def step_cycles(units: float, block_cycles: float, at_once: int) -> float:
    """Return the cycles of a step of each block: those of its busiest unit, or its share of the waiting."""
    return max(units, block_cycles / at_once)


@dataclass(frozen=True)
class Waves:
    """Blocks of one launch that run in waves of as many as fit on the GPU at a time."""

    blocks: int
    at_once: int
    """Blocks that fit on an SM."""
    device: Device

    def cycles(self, size: float, block_cycles: float, uneven: float) -> float:
        """Return the cycles in which all blocks have read their bytes, `size` each, and done their work.

        A block takes `block_cycles` cycles where memory is not the limit. A kernel may begin before the previous one
        ends, and fill more than half of the slots, but not all. Its first blocks then take the free slots and leave the
        remaining ones unevenly distributed: `uneven` is the cost of a slot that stays empty.
        """
        waves = self.blocks / (self.at_once * self.device.sm_count)
        full_waves = int(waves) if waves > 1 else 0
        shares = [1.0] * full_waves + ([waves - full_waves] if waves > full_waves else [])
        total = 0.0
        for share in shares:
            memory = share * self.at_once * size / self.device.memory
            if self.device.begins_early and 0.5 < share < 1 and not full_waves:
                memory *= 1 + uneven * (1 / share - 1)
            total += (memory**SMOOTH + block_cycles**SMOOTH) ** (1 / SMOOTH)
        return total


def min_seconds(flops: int, size: int, device: Device) -> float:
    """Return the shortest time for so many operations, or to read and write so many bytes."""
    cycles = CLOCK * device.sm_count
    return max(flops / (cycles * device.tensor_cores), size / (cycles * device.memory))
