"""Properties of GPUs that kernels need at compile time."""

from __future__ import annotations

from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class Device:
    """A GPU architecture. Cards differ in caches and SMs; those here are one card's and affect speed only."""

    arch: str
    """As nvcc's -arch accepts it."""
    shared_memory: int
    """Bytes of shared memory that one block may use (CUDA C++ Programming Guide, table of compute capabilities)."""
    l2: int
    """Bytes of the second-level cache."""
    sm_count: int
    """Number of SMs."""
    tensor_cores: int
    """Operations of an SM per cycle, in matmuls of half precision with accumulators in float32, by its best
    instructions.

    Source: architecture white papers; GeForce cards have half of the rate of their data center siblings.
    """
    cache: int
    """Bytes that the second-level cache delivers to an SM per cycle, roughly."""
    memory: int
    """Bytes that the device's memory delivers to an SM per cycle."""

    @property
    def generation(self) -> int:
        """The compute capability: 80, 86, 89, 90, 100 or 120."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))

    @property
    def begins_early(self) -> bool:
        """Whether kernels begin while the previous one ends (schedules/cuda/dependent_launch.py)."""
        return self.generation >= 90


_KIB, _MIB = 1 << 10, 1 << 20

DEVICES = {
    device.arch: device
    for device in (
        Device("sm_80", 163 * _KIB, 40 * _MIB, 108, 2048, 40, 10),  # A100
        Device("sm_86", 99 * _KIB, 6 * _MIB, 84, 1024, 20, 6),  # A10, A40, RTX 30
        Device("sm_89", 99 * _KIB, 72 * _MIB, 128, 512, 20, 3),  # RTX 40; L4 and L40 have 1024 operations
        Device("sm_90a", 227 * _KIB, 50 * _MIB, 132, 4096, 30, 19),  # H200, measured; H100 reads 14
        Device("sm_100", 227 * _KIB, 126 * _MIB, 148, 8192, 30, 28),  # B200, B300
        Device("sm_120", 99 * _KIB, 96 * _MIB, 170, 512, 20, 4),  # RTX 50; RTX PRO has 1024 operations
    )
}
"""Devices by architecture.

TMA and wgmma exist from sm_90a, asynchronous copies and mma.sync in bfloat16 from sm_80.
"""


def device(target: tvm.target.Target) -> Device:
    """Return the device of a CUDA target.

    Raises:
        ValueError: No kernel was written for the architecture.
    """
    arch = str(target.attrs["arch"])
    if arch not in DEVICES:
        raise ValueError(f"No kernel was written for {arch}. Supported architectures are {', '.join(DEVICES)}.")
    return DEVICES[arch]
