"""Tiles of matmuls with a norm prologue (fused_matmul.py), besides those of the matmuls; the problem is their
shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...tiles import Space
from ..elementwise.reduction import RowReductionTiles
from ..matmul.matmul_reader import MatmulShape
from ..matmul.small_m_tiles import SmallMTiles
from ..primitives.device import Device
from .prologue_rows import max_rows, row_memory_bytes


@dataclass(frozen=True)
class NormTiles(RowReductionTiles):
    """Tiles of the launch that computes many rows."""

    @classmethod
    def default(cls, problem: Any, machine: Device) -> NormTiles:
        return cls(RowReductionTiles.default(problem.depth, machine).warps)

    def estimate(self, problem: Any, machine: Device) -> float:
        return super().estimate(problem.depth, machine)


@dataclass(frozen=True)
class PrologueSmallMTiles(SmallMTiles):
    """Tiles of the launch whose blocks compute the few rows that they multiply, so that no copies of these are in
    flight.
    """

    def slots(self, matmuls: int, c: int) -> int:
        return self.slices(c) * 2 * matmuls

    def rules(self, problem: MatmulShape, device: Device) -> dict[str, bool]:
        rows = row_memory_bytes(problem.depth or 0)
        shared_bytes = self.shared_memory(problem) + rows
        return {
            **super().rules(problem, device),
            f"rows = {self.rows} must be 8": self.rows == 8,
            f"shared memory must have room for rows of {problem.depth}": max_rows(problem.depth or 0) > 0,
            f"{shared_bytes} bytes of shared memory must fit {device.shared_memory}": shared_bytes
            <= device.shared_memory,
        }

    @classmethod
    def space(cls, problem: MatmulShape, device: Device) -> Space:
        return {**super().space(problem, device), "rows": (8,)}

    @classmethod
    def default(cls, problem: MatmulShape, device: Device) -> PrologueSmallMTiles:
        """Return the tiles for rows that are read."""
        tiles = SmallMTiles.default(problem, device)
        return cls(tiles.warps, tiles.ahead)
