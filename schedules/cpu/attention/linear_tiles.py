"""Tiles of the CPU kernel for linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from lowering.attention.linear import ACC, LinearAttention

from ...tiles import Space, Tiles
from ..primitives.vector import CpuFeatures


@dataclass(frozen=True)
class LinearTiles(Tiles):
    """Tiles of the kernel in linear.py. A vector is a register of the machine, with W float32 lanes."""

    chunk: int
    """Tokens that are processed together: C. Multiple of W and of rows."""
    rows: int
    """Rows of the register tile of a matmul, which are tokens or rows of the state."""
    vectors: int
    """Vectors of columns of the register tile; columns are those of the state."""
    step_vectors: int
    """Vectors of columns that the loop over single tokens (decoding) processes together."""

    @classmethod
    def space(cls, problem: LinearAttention, cpu: CpuFeatures) -> Space:
        lanes = cpu.lanes(ACC)
        return {
            "chunk": tuple(n * lanes for n in (1, 2, 4)),
            "rows": (2, 4, 8),
            "vectors": (1, 2, 3),
            "step_vectors": (1, 2, 4, 8),
        }

    def rules(self, problem: LinearAttention, cpu: CpuFeatures) -> dict[str, bool]:
        step = max(cpu.lanes(ACC), self.rows)
        return {
            f"chunk = {self.chunk} must be a multiple of W and of rows": self.chunk % step == 0,
            f"chunk = {self.chunk} must be at most 32": self.chunk <= 32,
            f"the register tile {self.rows} x {self.vectors} must fit {cpu.registers} registers": (
                self.rows * self.vectors + self.vectors + 1 <= cpu.registers
            ),
        }

    @classmethod
    def default(cls, problem: LinearAttention, cpu: CpuFeatures) -> LinearTiles:
        lanes = cpu.lanes(ACC)
        if cpu.registers == 32:
            return LinearTiles(chunk=max(16, lanes), rows=8, vectors=2, step_vectors=4)
        return LinearTiles(chunk=max(8, lanes), rows=4, vectors=2, step_vectors=4)
