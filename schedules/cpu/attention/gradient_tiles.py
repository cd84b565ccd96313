"""Tiles of the CPU kernel for gradients of attention."""

from __future__ import annotations

from dataclasses import dataclass

from lowering.attention.record.problem import AttentionProblem

from ...tiles import Space
from ..primitives.vector import CpuFeatures
from .attention_tiles import QueryKeyTiles


@dataclass(frozen=True)
class GradientTiles(QueryKeyTiles):
    """Tiles of `gradient`."""

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

    @classmethod
    def default(cls, problem: AttentionProblem, cpu: CpuFeatures) -> GradientTiles:
        """Return the untuned default: tiles with more rows than prefill's, as each passes over all of dK and dV."""
        lanes = cpu.lanes(problem.acc_dtype)
        vectors = -(-min(problem.head_dim, problem.v_head_dim) // lanes)
        if cpu.registers == 32:
            pv_rows, pv_vectors = {1: (12, 1), 2: (8, 2), 3: (6, 3)}.get(vectors, (4, 4))
            return GradientTiles(8 * lanes, 64, qk_keys=8, qk_vectors=2, pv_rows=pv_rows, pv_vectors=pv_vectors)
        pv_rows, pv_vectors = {1: (8, 1)}.get(vectors, (6, 2))
        return GradientTiles(12 * lanes, 64, qk_keys=4, qk_vectors=2, pv_rows=pv_rows, pv_vectors=pv_vectors)
