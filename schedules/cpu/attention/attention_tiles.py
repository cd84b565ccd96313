"""Tiles of the CPU attention kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import DataType

from lowering.attention.record.problem import AttentionProblem

from ...tiles import Space, Tiles
from ..primitives.cycles import L1, L2, L2_LINE, LATENCY, TYPICAL, miss_ratio, padding_ratio, register_tile_cycles
from ..primitives.vector import CpuFeatures, cover_row

_SOFTMAX = 20  # vector operations for a pair: exp, maximum, sum
_STREAM = 4  # cycles for a vector from memory
_TILE = 100  # cycles until a tile's loops run
_STEP = 2  # cycles of a step of the matmuls' loops, apart from their FMAs
_LONG = TYPICAL * 16  # the number of keys assumed for a symbolic one
_LENGTHS = (20, 50, 128, 200, 512, 1024)  # numbers of queries for which a kernel is chosen if it is symbolic


@dataclass(frozen=True)
class QueryKeyTiles(Tiles):
    """Tiles of query rows by keys. Vectors are registers of the machine, W lanes of the accumulation type each."""

    q: int
    """Query rows per tile: B_r in the paper. A unit of parallel work. Multiple of qk_vectors * W."""
    kv: int
    """Keys per tile: B_c in the paper. Multiple of qk_keys."""
    qk_keys: int
    """S^T = K Q^T, and in gradients dP^T = V dY^T, in registers: keys of the register tile ..."""
    qk_vectors: int
    """... times vectors of query rows."""
    pv_rows: int
    """O += P V, and in gradients dV, dK and dQ, in registers: rows of the register tile ..."""
    pv_vectors: int
    """... times at most this number of vectors of a row."""

    def rules(self, problem: AttentionProblem, cpu: CpuFeatures) -> dict[str, bool]:
        panel = self.qk_vectors * cpu.lanes(problem.acc_dtype)
        rules = {
            f"q = {self.q} must be a multiple of qk_vectors * W = {panel}": self.q % panel == 0,
            f"kv = {self.kv} must be a multiple of qk_keys = {self.qk_keys}": self.kv % self.qk_keys == 0,
        }
        for name, rows, vectors in (("qk", self.qk_keys, self.qk_vectors), ("pv", self.pv_rows, self.pv_vectors)):
            tile = f"the {name} register tile {rows} x {vectors}"
            rules[f"{tile} must fit {cpu.registers} registers"] = _fits(rows, vectors, cpu)
        return rules


@dataclass(frozen=True)
class PrefillTiles(QueryKeyTiles):
    """Tiles of `prefill`, whose q is a multiple of pv_rows, too.

    The query rows of the G heads that share a key/value head are packed, so q counts rows of all of them.
    """

    chains: int = 4
    """Independent chains of row maxima and row sums. Even, and a divisor of qk_keys."""

    @classmethod
    def space(cls, problem: AttentionProblem, cpu: CpuFeatures) -> Space:
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

    def rules(self, problem: AttentionProblem, cpu: CpuFeatures) -> dict[str, bool]:
        lanes = cpu.lanes(problem.acc_dtype)
        return super().rules(problem, cpu) | {
            f"q = {self.q} must be a multiple of pv_rows = {self.pv_rows}": self.q % self.pv_rows == 0,
            f"kv = {self.kv} must be a multiple of W = {lanes}": self.kv % lanes == 0,
            f"qk_keys = {self.qk_keys} must be a multiple of 4": self.qk_keys % 4 == 0,
            f"chains = {self.chains} must be even and divide qk_keys": self.chains % 2
            == self.qk_keys % self.chains
            == 0,
        }

    def estimate(self, problem: AttentionProblem, cpu: CpuFeatures) -> float:
        """Estimate the log of the cycles of a pair of a query row and a key.

        A symbolic number of queries counts with several lengths, since rows at the edge of a tile cost short ones more.
        """
        lengths = _LENGTHS if problem.q_len is None else (problem.q_len,)
        estimates = (self._estimate_rows(problem, cpu, length * problem.group) for length in lengths)
        return sum(estimates) / len(lengths)

    def _estimate_rows(self, problem: AttentionProblem, cpu: CpuFeatures, rows: int) -> float:
        """Estimate the log of the cycles of a pair, for so many query rows of a key/value head.

        It counts both matmuls in their register tiles, the softmax, and each row's share of the cost of a tile of keys.
        It adds the wasted work of register tiles at the edges and of tiles under a causal diagonal.
        """
        lanes = cpu.lanes(problem.acc_dtype)
        keys = problem.kv_len or _LONG
        vectors = -(-problem.v_head_dim // lanes)
        width = min(self.pv_vectors, vectors)
        scores = problem.head_dim * _cycles_of_fma(self.qk_keys, self.qk_vectors)
        accumulation = vectors * lanes * _cycles_of_fma(self.pv_rows, width) * padding_ratio(rows, self.pv_rows)
        rescaled = 2 * vectors * lanes / self.kv
        softmax = _SOFTMAX * max(LATENCY / 2 / self.chains, 1.0)
        unpacked = L2_LINE * (problem.head_dim + problem.v_head_dim) / self.q
        tiles = 4 * (self.q * self.kv + self.kv * (problem.head_dim + problem.v_head_dim) + self.q * problem.v_head_dim)
        spilled = L2_LINE * (problem.head_dim + problem.v_head_dim) / self.q * lanes / 4 * miss_ratio(tiles, L2)
        by_panels = (scores + softmax) * padding_ratio(rows, self.qk_vectors * lanes)
        diagonal = 1 + (self.q / problem.group + self.kv) / keys if problem.is_causal else 1.0
        cycles = by_panels + accumulation + rescaled + unpacked + spilled
        return math.log(cycles * padding_ratio(keys, self.kv) * diagonal)

    @classmethod
    def default(cls, problem: AttentionProblem, cpu: CpuFeatures) -> PrefillTiles:
        """Return the untuned default: the best, by estimate, of register tiles that keep the FMA units busy.

        Tiles of S, Q, K and V fit the caches. More rows unpack K and V less often.
        """
        vectors = len(cover_row(problem.v_head_dim, cpu.lanes(problem.acc_dtype))[1])
        if cpu.registers == 32:
            tall = {1: (16, 1), 2: (12, 2)}.get(vectors, (8, 3) if vectors in (3, 5, 6) else (6, 4))
            wide = {1: (16, 1), 2: (8, 2), 3: (8, 3)}.get(vectors, (4, 4))
            candidates = [(96, 8, 3, *tall), (64, 4, 4, *wide), (64, 8, 2, *wide)]
        else:
            candidates = [(48, 4, 3, *{1: (12, 1)}.get(vectors, (6, 2)))]
        tiles = [PrefillTiles(q, 64, qk_keys=n, qk_vectors=m, pv_rows=r, pv_vectors=v) for q, n, m, r, v in candidates]
        return min(tiles, key=lambda choice: choice.estimate(problem, cpu))


@dataclass(frozen=True)
class DecodeTiles(Tiles):
    """Tiles of `decode`."""

    q_len: int
    """The largest S that the kernel supports; it determines the size of its scratch memory."""
    kv: int
    """Keys per tile: B_c. Multiple of W."""
    split: int
    """Keys that are worth a split: a sequence is split so that the longest splits have about this many ..."""
    max_splits: int
    """... but not into more splits than this."""
    pv_rows: int
    """O += P V in registers: query rows of the register tile (the remaining rows one by one) ..."""
    pv_vectors: int
    """... times at most this number of vectors of v_head_dim."""
    ahead: int = 1
    """The prefetch distance of K and V rows, in tiles."""
    parallel_work: int = 1 << 16
    """Operations from which on threads share the splits, and the merging of them."""

    @classmethod
    def space(cls, problem: AttentionProblem, cpu: CpuFeatures) -> Space:
        lanes = cpu.lanes(problem.acc_dtype)
        heights = {max(1, rows // problem.group) for rows in (1, 2, 4, 8, MAX_DECODE_ROWS, 32)}
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

    def rules(self, problem: AttentionProblem, cpu: CpuFeatures) -> dict[str, bool]:
        lanes = cpu.lanes(problem.acc_dtype)
        tile = f"{self.pv_rows} x {self.pv_vectors}"
        return {
            f"kv = {self.kv} must be a multiple of W = {lanes}": self.kv % lanes == 0,
            f"the pv register tile {tile} must fit {cpu.registers} registers": _fits(
                self.pv_rows, self.pv_vectors, cpu
            ),
            "q_len, split, max_splits and ahead must be positive": (
                min(self.q_len, self.split, self.max_splits, self.ahead) > 0
            ),
        }

    def estimate(self, problem: AttentionProblem, cpu: CpuFeatures) -> float:
        """Estimate the log of the cycles of a key.

        It counts reading the key, the register tile of P V for its rows, and its share of the cost of a tile and of a
        split.
        """
        lanes = cpu.lanes(problem.acc_dtype)
        vectors, rows = -(-problem.v_head_dim // lanes), problem.group * (problem.q_len or 1)
        width, height = min(self.pv_vectors, vectors), min(self.pv_rows, rows)
        read = _STREAM * (problem.head_dim + problem.v_head_dim) / lanes
        accumulation = vectors * rows * register_tile_cycles(height, width) / (height * width)
        scores = rows * problem.head_dim / lanes
        row = 4 * (problem.head_dim + problem.v_head_dim)
        reread = L2_LINE * problem.v_head_dim * 4 / 64 * miss_ratio(self.kv * row, L1)
        tile = (_TILE + rows * vectors) / self.kv
        keys = problem.kv_len or _LONG
        splits = max(min(-(-keys // self.split), self.max_splits), 1)
        merge = splits * (_TILE + rows * vectors * 2) / keys if splits > 1 else 0.0
        return math.log(max(read, scores + accumulation) + reread + tile + merge)

    @classmethod
    def default(cls, problem: AttentionProblem, cpu: CpuFeatures) -> DecodeTiles:
        """Return the untuned default: half the first-level cache holds a tile of V.

        Its rows are read whole, so that the hardware prefetcher follows the stream. Half precision, which is widened at
        each use, instead meets more query rows at once.
        """
        lanes = cpu.lanes(problem.acc_dtype)
        _, v_dtype = problem.stored_types
        row = problem.v_head_dim * DataType(v_dtype).bits // 8
        kv = min(max(16384 // row // lanes, 1), 4) * lanes
        widened = v_dtype != problem.acc_dtype
        pv_rows, pv_vectors = (4, cpu.registers // 8) if widened else (2, cpu.registers // 4)
        q_len = max(1, MAX_DECODE_ROWS // problem.group)
        return DecodeTiles(q_len, kv, split=256, max_splits=64, pv_rows=pv_rows, pv_vectors=pv_vectors)


MAX_DECODE_ROWS = 16  # packed query rows up to which reading K and V takes longer than the arithmetic


def _cycles_of_fma(rows: int, vectors: int) -> float:
    """Return the cycles of a vector FMA of a register tile."""
    return (register_tile_cycles(rows, vectors) + _STEP) / (rows * vectors)


def _fits(rows: int, vectors: int, cpu: CpuFeatures) -> bool:
    """Return whether an outer-product register tile leaves registers for its operands."""
    return rows * vectors + vectors + 1 <= cpu.registers
