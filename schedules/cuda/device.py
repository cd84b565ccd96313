"""What a kernel has to know about a GPU before it meets one."""

from __future__ import annotations

from dataclasses import dataclass

import tvm


@dataclass(frozen=True)
class Device:
    """A GPU architecture. Cards differ in caches and multiprocessors; those here are one card's, for speed alone."""

    arch: str
    """As nvcc's -arch takes it."""
    shared_memory: int
    """Bytes of shared memory that one block may use (CUDA C++ Programming Guide, table of compute capabilities)."""
    l2: int
    """Bytes of the second-level cache."""
    multiprocessors: int
    """Blocks run on so many at a time."""

    @property
    def generation(self) -> int:
        """The compute capability: 80, 86, 89, 90, 100 or 120."""
        return int(self.arch.removeprefix("sm_").rstrip("a"))


_KIB, _MIB = 1 << 10, 1 << 20

DEVICES = {
    device.arch: device
    for device in (
        Device("sm_80", 163 * _KIB, 40 * _MIB, 108),  # A100
        Device("sm_86", 99 * _KIB, 6 * _MIB, 84),  # A10, A40, RTX 30
        Device("sm_89", 99 * _KIB, 72 * _MIB, 128),  # L4, L40, RTX 40
        Device("sm_90a", 227 * _KIB, 50 * _MIB, 132),  # H100, H200
        Device("sm_100a", 227 * _KIB, 126 * _MIB, 148),  # B200
        Device("sm_120", 99 * _KIB, 96 * _MIB, 170),  # RTX 50, RTX PRO
    )
}
"""By architecture. TMA and wgmma exist from sm_90a, asynchronous copies and mma.sync in bfloat16 from sm_80."""


def device(target: tvm.target.Target) -> Device:
    """The device of a CUDA target. Raises ValueError for an architecture that no kernel was written for."""
    arch = str(target.attrs["arch"])
    if arch not in DEVICES:
        raise ValueError(f"No kernel was written for {arch}; known are {', '.join(DEVICES)}.")
    return DEVICES[arch]
