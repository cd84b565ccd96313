"""Tiles of matmuls whose rows are computed first (prologue_matmul.py), but for those of the matmuls themselves; the
problem is their shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..tiles import Space
from .device import Device
from .matmul_reader import Shape
from .prologue_rows import most_rows, shared_memory
from .reduction import RowReductionTiles
from .small_m_tiles import SmallMTiles


@dataclass(frozen=True)
class NormTiles(RowReductionTiles):
    """Of the launch that computes many rows."""

    @classmethod
    def default(cls, problem: Any, machine: Device) -> NormTiles:
        return cls(RowReductionTiles.default(problem.depth, machine).warps)

    def estimate(self, problem: Any, machine: Device) -> float:
        return super().estimate(problem.depth, machine)


@dataclass(frozen=True)
class PrologueSmallMTiles(SmallMTiles):
    """Of the launch whose blocks compute the few rows that they multiply: of these nothing is on its way."""

    def places(self, matmuls: int, c: int) -> int:
        return self.pieces(c) * 2 * matmuls

    def rules(self, problem: Shape, device: Device) -> dict[str, bool]:
        rows = shared_memory(problem.depth or 0)
        shared = self.shared_memory(problem) + rows
        return {
            **super().rules(problem, device),
            f"rows = {self.rows} must be 8": self.rows == 8,
            f"there is no room for rows of {problem.depth}": most_rows(problem.depth or 0) > 0,
            f"{shared} bytes of shared memory are more than {device.shared_memory}": shared <= device.shared_memory,
        }

    @classmethod
    def space(cls, problem: Shape, device: Device) -> Space:
        return {**super().space(problem, device), "rows": (8,)}

    @classmethod
    def default(cls, problem: Shape, device: Device) -> PrologueSmallMTiles:
        """As where rows are read."""
        tiles = SmallMTiles.default(problem, device)
        return cls(tiles.warps, tiles.ahead)
