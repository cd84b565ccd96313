"""Tiles of the CPU kernel for gradients of attention."""

from __future__ import annotations

from dataclasses import dataclass

from lowering.attention.record.problem import AttentionProblem

from ...tiles import Space, Tiles
from ..primitives.vector import CpuFeatures


@dataclass(frozen=True)
class GradientTiles(Tiles):
    """Tiles of `gradient`. Vectors are registers of the machine, W lanes of the accumulation type each."""

    q: int
    """Query rows per tile: B_r in the paper. Multiple of qk_vectors * W."""
    kv: int
    """Keys per tile: B_c in the paper. Multiple of qk_keys."""
    qk_keys: int
    """S^T = K Q^T and dP^T = V dY^T in registers: keys of the register tile ..."""
    qk_vectors: int
    """... times vectors of query rows."""
    pv_rows: int
    """dV, dK and dQ in registers: rows of the register tile ..."""
    pv_vectors: int
    """... times at most this number of vectors of a row."""

    @classmethod
    def space(cls, problem: AttentionProblem, cpu: CpuFeatures) -> Space:
        lanes = cpu.lanes(problem.acc_dtype)
        return {
            "q": tuple(n * lanes for n in (2, 3, 4, 6, 8, 12, 16)),
            "kv": (16, 32, 48, 64, 96, 128, 192, 256),
            "qk_keys": (4, 6, 8, 12),
            "qk_vectors": (1, 2, 3, 4),
            "pv_rows": (2, 3, 4, 6, 8, 12),
            "pv_vectors": (1, 2, 3, 4, 6),
        }

    def rules(self, problem: AttentionProblem, cpu: CpuFeatures) -> dict[str, bool]:
        panel = self.qk_vectors * cpu.lanes(problem.acc_dtype)
        rules = {
            f"q = {self.q} must be a multiple of qk_vectors * W = {panel}": self.q % panel == 0,
            f"kv = {self.kv} must be a multiple of qk_keys = {self.qk_keys}": self.kv % self.qk_keys == 0,
        }
        for rows, vectors in ((self.qk_keys, self.qk_vectors), (self.pv_rows, self.pv_vectors)):
            fits = rows * vectors + vectors + 1 <= cpu.registers
            rules[f"the register tile {rows} x {vectors} does not fit {cpu.registers} registers"] = fits
        return rules

    @classmethod
    def default(cls, problem: AttentionProblem, cpu: CpuFeatures) -> GradientTiles:
        """Return the untuned default: prefill's tiles with more rows, as each tile of rows passes over all of dK and
        dV."""
        lanes = cpu.lanes(problem.acc_dtype)
        vectors = -(-min(problem.head_dim, problem.v_head_dim) // lanes)
        if cpu.registers == 32:
            pv_rows, pv_vectors = {1: (12, 1), 2: (8, 2), 3: (6, 3)}.get(vectors, (4, 4))
            return GradientTiles(8 * lanes, 64, qk_keys=8, qk_vectors=2, pv_rows=pv_rows, pv_vectors=pv_vectors)
        pv_rows, pv_vectors = {1: (8, 1)}.get(vectors, (6, 2))
        return GradientTiles(12 * lanes, 64, qk_keys=4, qk_vectors=2, pv_rows=pv_rows, pv_vectors=pv_vectors)
