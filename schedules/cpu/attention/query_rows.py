"""Packed rows of a query tile: Q, m, l and O in scratch memory, from their loads to Y.

Row r is query row r // G of head r % G. Q is transposed, in panels of rows. The scratch memory of S, P, the mask and
the visible keys of each row is allocated with it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention

from ..matmul.dot_bf16 import pack_vector
from ..primitives.vector import (
    CpuFeatures,
    allocate_workspace,
    cover_row,
    let,
    load,
    splat,
    splat_like,
    store,
    transpose,
)
from .attention_tiles import PrefillTiles
from .kv_tile import KeyValueTile, load_query, store_y


class QueryRows:
    """Packed rows [r0, r0 + B_r) of key/value head hk in batch b, and the memory of their tile."""

    def __init__(
        self, bound: BoundAttention, tiles: PrefillTiles, cpu: CpuFeatures, b: Expr, hk: Expr, r0: Expr, rows: Expr
    ) -> None:
        self.bound, self.problem, self.tiles, self.cpu = bound, bound.problem, tiles, cpu
        self.b, self.hk, self.r0, self.rows = b, hk, r0, rows
        self.acc = self.problem.acc_dtype
        self.W = cpu.lanes(self.acc)
        self.panel = tiles.qk_vectors * self.W
        self.here = let(tirx.min(T.int64(tiles.q), rows - r0))  # rows of the tile that exist
        self.panels = let(tirx.ceildiv(self.here, self.panel))
        self.kv = KeyValueTile(bound, cpu, tiles.kv, tiles.kv, b, hk)
        self.Wv, self.vectors = self.kv.Wv, self.kv.vectors
        per_row = bound.scores.mask_per_row
        self.memory = allocate_workspace(
            Q=(self.kv.D * tiles.q, self.acc),  # scale Q_i^T (packed lanes: Q_i^T), by panels: [panel][d][row]
            S=(tiles.kv * tiles.q, self.acc),  # S^T, then P^T: [key][row] (packed lanes: [pair of keys][row])
            O=(tiles.q * self.vectors * self.Wv, self.acc),  # [row][vector][lane]
            m=(tiles.q, self.acc),
            l=(tiles.q, self.acc),
            m_new=(tiles.q, self.acc),
            alpha=(tiles.q, self.acc),
            lo=(bound.keys.range_count * tiles.q, "int32"),  # keys [lo, hi) of each row: [range][row]
            hi=(bound.keys.range_count * tiles.q, "int32"),
            M=(bound.scores.has_mask * tiles.kv * (tiles.q if per_row else 1), self.acc),  # [key][row]
            **self.kv.scratch,
        )
        self.Q, self.S, self.O = (self.memory[name] for name in "QSO")
        self.m, self.l, self.alpha = (self.memory[name] for name in ("m", "l", "alpha"))

    def head_and_row(self, r: Expr) -> tuple[Expr, Expr]:
        """Return the query head and query row of packed row r."""
        group = self.problem.group
        return self.hk * group + r % group, r // group

    def heads_and_rows(self, r: Expr) -> tuple[Expr, Expr]:
        """Return the query heads and query rows of the vector at packed row r of the tile."""
        rows = T.ramp(self.r0 + r, 1, self.W)
        group = splat_like(self.problem.group, rows)
        return self.hk * self.problem.group + tirx.floormod(rows, group), tirx.floordiv(rows, group)

    def load_queries(self) -> None:
        """Compute Q := scale Q_i^T, or packed lanes of Q_i^T. Rows past the end repeat the last one."""
        D = self.kv.D
        w, starts = cover_row(D, self.W)
        factor = self.kv.tensor_scale("k")
        scale = splat(self.bound.scores.scale * (1.0 if factor is None else factor), w, self.acc)

        def vector(row: tuple[Expr, Expr], d: Expr) -> Expr:
            h, i = row
            if not self.kv.pairs:
                return let(load_query(self.bound, self.cpu, (self.b, h, i), d, w) * scale)
            buffer, indices = self.bound.addressing.at("q", self.b, h, i, T.int64(2) * d)
            return pack_vector(load(buffer, 2 * w, *indices))

        with T.serial(self.panels * (self.panel // w)) as block:
            rows = []
            for k in range(w):
                rows.append(self.head_and_row(let(tirx.min(self.r0 + block * w + k, self.rows - 1))))
            column = let(block * w // self.panel * (D * self.panel) + block * w % self.panel)
            with T.serial(len(starts)) as n:
                d = let(tirx.min(n * w, D - w))
                for k, x in enumerate(transpose([vector(row, d) for row in rows])):
                    store(self.Q, x, column + (d + k) * self.panel)

    def initialize(self) -> None:
        """Initialize m, l and O, and [lo, hi): the keys that each row sees before the mask tensor is applied."""
        with T.serial(self.tiles.q) as r:
            h, i = self.head_and_row(let(tirx.min(self.r0 + r, self.rows - 1)))
            for buffer, value in zip((self.m, self.l), self.bound.scores.compute_initial_statistics(h)):
                T.buffer_store(buffer, value, [r])
            T.buffer_store(self.memory["m_new"], self.m[r], [r])
            for n, (lo, hi) in enumerate(self.bound.keys.compute_row_ranges(self.b, i)):
                T.buffer_store(self.memory["lo"], lo.astype("int32"), [n * self.tiles.q + r])
                T.buffer_store(self.memory["hi"], hi.astype("int32"), [n * self.tiles.q + r])
        with T.serial(self.tiles.q * self.vectors) as r:
            store(self.O, splat(0.0, self.Wv, self.acc), r * self.Wv)

    def store_y(self) -> None:
        """Store Y_i := O / l, or 0 where l = 0. A NaN in l is not 0 and stays."""
        with T.serial(self.here) as r:
            h, i = (T.bind(x) for x in self.head_and_row(self.r0 + r))
            l = self.l[r]
            self.bound.addressing.store_statistics(self.b, h, i, self.m[r], l)
            inverse = tirx.Select(l == tirx.const(0, self.acc), tirx.const(0, self.acc), tirx.const(1, self.acc) / l)
            inverse = T.bind(splat(inverse, self.Wv, self.acc))
            y = [T.bind(load(self.O, self.Wv, (r * self.vectors + n) * self.Wv) * inverse) for n in range(self.vectors)]
            y = self.kv.apply_factor(y)
            store_y(self.bound, self.cpu, self.b, h, i, y, self.kv.v_starts)
