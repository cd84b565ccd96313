"""Tiles of the CPU attention kernels."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import DataType

from lowering.attention.problem import AttentionProblem

from ..tiles import Space, Tiles
from .vector import Machine, cover


@dataclass(frozen=True)
class PrefillTiles(Tiles):
    """Tiles of `prefill`. Vectors are registers of the machine, W lanes of the accumulation type each.

    The query rows of the G heads that share a key/value head are packed, so q counts rows of all of them.
    """

    q: int
    """Query rows per tile: B_r in the paper. A unit of parallel work. Multiple of qk_vectors * W and of pv_rows."""
    kv: int
    """Keys per tile: B_c in the paper. Multiple of qk_keys."""
    qk_keys: int
    """S^T = K Q^T in registers: keys of the register tile ..."""
    qk_vectors: int
    """... times vectors of query rows."""
    pv_rows: int
    """O += P V in registers: query rows of the register tile ..."""
    pv_vectors: int
    """... times at most so many vectors of v_head_dim."""
    chains: int = 4
    """Maxima and sums of a row that do not wait for one another. Even, and a divisor of qk_keys."""

    @classmethod
    def space(cls, problem: AttentionProblem, cpu: Machine) -> Space:
        lanes = cpu.lanes(problem.acc_dtype)
        heights = (1, 2, 3, 4, 6, 8, 12, 16)
        return {
            "q": tuple(n * lanes for n in (1, 2, 3, 4, 6, 8, 12)),
            "kv": tuple(n * lanes for n in (1, 2, 4, 6, 8, 12, 16)),
            "qk_keys": (4, 8, 12, 16),
            "qk_vectors": (1, 2, 3, 4),
            "pv_rows": heights,
            "pv_vectors": (1, 2, 3, 4, 6),
            "chains": (2, 4, 8),
        }

    def rules(self, problem: AttentionProblem, cpu: Machine) -> dict[str, bool]:
        lanes = cpu.lanes(problem.acc_dtype)
        panel = self.qk_vectors * lanes
        rules = {
            f"q = {self.q} must be a multiple of qk_vectors * W = {panel}": self.q % panel == 0,
            f"q = {self.q} must be a multiple of pv_rows = {self.pv_rows}": self.q % self.pv_rows == 0,
            f"kv = {self.kv} must be a multiple of qk_keys = {self.qk_keys}": self.kv % self.qk_keys == 0,
            f"kv = {self.kv} must be a multiple of W = {lanes}": self.kv % lanes == 0,
            f"qk_keys = {self.qk_keys} must be a multiple of 4": self.qk_keys % 4 == 0,
            f"chains = {self.chains} must be even and divide qk_keys": self.chains % 2
            == self.qk_keys % self.chains
            == 0,
        }
        for name, rows, vectors in (
            ("qk", self.qk_keys, self.qk_vectors),
            ("pv", self.pv_rows, self.pv_vectors),
        ):
            tile = f"the {name} register tile {rows} x {vectors}"
            rules[f"{tile} does not fit {cpu.registers} registers"] = _fits(rows, vectors, cpu)
        return rules

    @classmethod
    def default(cls, problem: AttentionProblem, cpu: Machine) -> PrefillTiles:
        """Untuned but good: register tiles that keep the FMA units busy, and S, Q, K and V tiles that share the caches.

        The figures are flat around these: 32 to 96 query rows and 64 to 256 keys are within 3 %. Fewer rows waste less
        under a causal mask, more rows unpack K and V less often.
        """
        vectors = len(cover(problem.v_head_dim, cpu.lanes(problem.acc_dtype))[1])
        if cpu.registers == 32:
            pv_rows, pv_vectors = {1: (16, 1), 2: (8, 2), 3: (8, 3)}.get(vectors, (4, 4))
            return PrefillTiles(64, 64, qk_keys=8, qk_vectors=2, pv_rows=pv_rows, pv_vectors=pv_vectors)
        pv_rows, pv_vectors = {1: (12, 1)}.get(vectors, (6, 2))
        return PrefillTiles(48, 64, qk_keys=4, qk_vectors=3, pv_rows=pv_rows, pv_vectors=pv_vectors)


@dataclass(frozen=True)
class DecodeTiles(Tiles):
    """Tiles of `decode`."""

    q_len: int
    """The largest S that the kernel takes; it sets the size of its scratch memory."""
    kv: int
    """Keys per tile: B_c. Multiple of W."""
    split: int
    """Keys that are worth a split: a sequence is cut so that the longest parts have about this many ..."""
    max_splits: int
    """... but not into more parts than this."""
    pv_rows: int
    """O += P V in registers: query rows of the register tile (left-over rows go one by one) ..."""
    pv_vectors: int
    """... times at most so many vectors of v_head_dim."""
    ahead: int = 1
    """How many tiles before a tile is read its rows are asked for."""
    parallel_work: int = 1 << 16
    """Operations from which on threads share the work of putting splits together."""

    @classmethod
    def space(cls, problem: AttentionProblem, cpu: Machine) -> Space:
        lanes = cpu.lanes(problem.acc_dtype)
        heights = {max(1, rows // problem.group) for rows in (1, 2, 4, 8, MOST_DECODE_ROWS, 32)}
        return {
            "q_len": tuple(sorted(heights)),
            "kv": tuple(n * lanes for n in (1, 2, 3, 4, 8, 16)),
            "split": (64, 128, 256, 512, 1024, 4096),
            "max_splits": (1, 4, 16, 64),
            "pv_rows": (1, 2, 4, 8),
            "pv_vectors": (1, 2, 4, 8),
            "ahead": (1, 2, 4),
            "parallel_work": (1 << 12, 1 << 14, 1 << 16, 1 << 18),
        }

    def rules(self, problem: AttentionProblem, cpu: Machine) -> dict[str, bool]:
        lanes = cpu.lanes(problem.acc_dtype)
        tile = f"{self.pv_rows} x {self.pv_vectors}"
        return {
            f"kv = {self.kv} must be a multiple of W = {lanes}": self.kv % lanes == 0,
            f"the pv register tile {tile} does not fit {cpu.registers} registers": _fits(
                self.pv_rows, self.pv_vectors, cpu
            ),
            "q_len, split, max_splits and ahead must be positive": (
                min(self.q_len, self.split, self.max_splits, self.ahead) > 0
            ),
        }

    @classmethod
    def default(cls, problem: AttentionProblem, cpu: Machine) -> DecodeTiles:
        """Untuned but good: half the first-level cache keeps a tile of V, whose rows are read whole, so that hardware
        follows the stream; half precision, which is widened at each use, meets more query rows at once instead.
        """
        lanes = cpu.lanes(problem.acc_dtype)
        _, v_dtype = problem.stored_types
        row = problem.v_head_dim * DataType(v_dtype).bits // 8
        kv = min(max(16384 // row // lanes, 1), 4) * lanes
        widened = v_dtype != problem.acc_dtype
        pv_rows, pv_vectors = (4, cpu.registers // 8) if widened else (2, cpu.registers // 4)
        q_len = max(1, MOST_DECODE_ROWS // problem.group)
        return DecodeTiles(q_len, kv, split=256, max_splits=64, pv_rows=pv_rows, pv_vectors=pv_vectors)


MOST_DECODE_ROWS = 16  # packed query rows up to which reading K and V takes longer than the arithmetic


def _fits(rows: int, vectors: int, cpu: Machine) -> bool:
    """Whether an outer-product register tile leaves room for its operands."""
    return rows * vectors + vectors + 1 <= cpu.registers
