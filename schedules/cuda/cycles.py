"""A rough model of a GPU, in cycles of its SMs: what tiles should cost before anything is measured.

It orders a tuner's first candidates, and only differences between tiles of one problem count. A kernel takes as long
as the SM with the most blocks. Blocks there share units, each of which does so much in a cycle (a roofline
per step); a block alone also waits for its own results, which only other blocks hide.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device

EXPONENTIALS = 16
"""Of an SM in a cycle."""

LANES = 128
"""Of arithmetic in float32."""

EXPANSION = 3
"""Instructions that make a number of half precision of a code of a cache, roughly."""

SHARED = 128
"""Bytes of shared memory that it reads or writes in a cycle."""

LATENCY = 700
"""Cycles until what was asked of the device's memory, or of its cache, is here."""

BARRIER = 40
"""Cycles of a barrier, or of an exchange between threads."""

LAUNCH = 3000
"""Cycles of one more launch."""

TYPICAL = 1024
"""What a size that is not known is taken for."""

SMOOTH = 3
"""How sharply two limits of a kernel meet: the exponent of the norm that joins them."""

CLOCK = 1.5e9
"""Cycles of a second, roughly."""

_REGISTERS, _WARPS = 65536, 64  # of an SM
_RESERVED = 1024  # bytes of shared memory that a block takes beside its own


_WARP_INSTRUCTIONS = {90: 0.62, 100: 0.31}  # of the rate of tensor cores, where mma.sync is not their best


def warp_matmuls(device: Device) -> float:
    """Operations of an SM in a cycle in matmuls by mma.sync."""
    return device.tensor_cores * _WARP_INSTRUCTIONS.get(device.generation, 1.0)


@dataclass(frozen=True)
class Load:
    """Of the busiest SM: the blocks that it has in all, and how many at a time."""

    blocks: int
    at_once: int


def resident_blocks(device: Device, threads: int, registers: int, shared_memory: int) -> int:
    """Return how many blocks an SM holds, of so many threads, registers per thread and bytes of shared
    memory."""
    warps = -(-threads // 32)
    fit = min(
        _WARPS // warps,
        _REGISTERS // (warps * 32 * -(-registers // 8) * 8),
        (device.shared_memory + _RESERVED) // (shared_memory + _RESERVED),
    )
    return max(fit, 1)


def load(blocks: int, device: Device, threads: int, registers: int, shared_memory: int) -> Load:
    """Blocks of so many threads, registers per thread and bytes of shared memory, shared out."""
    most = -(-blocks // device.sm_count)
    return Load(most, max(min(resident_blocks(device, threads, registers, shared_memory), most), 1))


def step(units: float, alone: float, at_once: int) -> float:
    """Cycles of a step of each of these blocks: what its busiest unit takes, or its share of the waiting."""
    return max(units, alone / at_once)


@dataclass(frozen=True)
class Waves:
    """Blocks of one launch that run in waves of as many as the GPU holds at a time."""

    blocks: int
    at_once: int
    """Blocks that an SM holds."""
    device: Device

    def cycles(self, size: float, alone: float, uneven: float) -> float:
        """Return the cycles in which all blocks have read their bytes, `size` each, and done their work.

        A block takes `alone` cycles where memory is not what limits it. Where a kernel begins before the one before it
        ends and fills more than half of the slots, but not all, its first blocks take the slots that are free and
        leave the others unevenly shared out: `uneven` says what a slot that stays empty costs.
        """
        waves = self.blocks / (self.at_once * self.device.sm_count)
        whole = int(waves) if waves > 1 else 0
        shares = [1.0] * whole + ([waves - whole] if waves > whole else [])
        total = 0.0
        for share in shares:
            memory = share * self.at_once * size / self.device.memory
            if self.device.begins_early and 0.5 < share < 1 and not whole:
                memory *= 1 + uneven * (1 / share - 1)
            total += (memory**SMOOTH + alone**SMOOTH) ** (1 / SMOOTH)
        return total


def least_seconds(flops: int, size: int, device: Device) -> float:
    """The shortest time for so many operations, or to read and write so many bytes."""
    each = CLOCK * device.sm_count
    return max(flops / (each * device.tensor_cores), size / (each * device.memory))
