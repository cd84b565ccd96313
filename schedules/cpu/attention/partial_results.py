"""Partial results of attention: (m, l, O) of query rows with splits of the keys, and their merge into Y.

m = max m_s,  w_s = exp(m_s - m)                     s counts the splits; a sink is one more, with O_s = 0
Y = sum w_s O_s / sum w_s l_s                        0 where no key was visible
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.plain import PlainRow
from lowering.attention.codegen.scores import HIDDEN_BIAS

from ..primitives.vector import LOG2_E, CpuFeatures, Register, exp2, let, load, splat
from .attention_tiles import DecodeTiles
from .kv_form import cover_values
from .kv_tile import store_y


class PartialResults:
    """(m, l, O) of every query row and split, in that order, and their merge into Y."""

    def __init__(self, bound: BoundAttention, tiles: DecodeTiles, cpu: CpuFeatures) -> None:
        self.bound, self.tiles, self.cpu, self.acc = bound, tiles, cpu, bound.problem.acc_dtype
        # TVM moves an allocation of the outermost level to the top of the function, where its size must be computable.
        rows = T.int64(1) * bound.B * bound.problem.q_heads * tirx.min(T.int64(1) * bound.S, T.int64(tiles.q_len))
        splits = tirx.max(tirx.min(tirx.ceildiv(T.int64(1) * bound.T, tiles.split), tiles.max_splits), 1)
        size = rows * (bound.problem.splits or splits)
        self.Wv, self.v_starts = cover_values(bound.problem, cpu, in_place=True)
        self.stride = len(self.v_starts) * self.Wv
        self.m, self.l = (T.alloc_buffer((size,), self.acc) for _ in range(2))
        self.O = T.alloc_buffer((size * self.stride,), self.acc, align=64)

    def merge(self, row: Expr, rows: Expr, splits: Expr) -> None:
        """Emit Y of row `row`, counted over all batches and key/value heads."""
        p = self.bound.problem
        head, r = let(row // rows), let(row % rows)
        b, h, i = let(head // p.kv_heads), let(head % p.kv_heads * p.group + r % p.group), let(r // p.group)
        with self.bound.guard_row_count(b, 1, self.tiles.q_len), self.bound.guard_row(b, i):
            self.merge_row((b, h, i), let(row * splits), splits)

    def merge_row(self, position: tuple[Expr, Expr, Expr], first: Expr, splits: Expr) -> None:
        """Emit Y at (b, h, i) from the partial results of all splits, the first of which has index `first`."""
        b, h, i = position
        m_0, l_0 = (let(x) for x in self.bound.scores.compute_initial_statistics(h))
        m = Register(m_0)
        with T.serial(splits) as s:
            m.value = tirx.max(m.value, self.m[first + s])

        def store() -> None:
            l, y = self.combine_splits(m.value, (m_0, l_0), first, splits)
            self.bound.addressing.store_statistics(b, h, i, m.value, l)
            store_y(self.bound, self.cpu, b, h, i, y, self.v_starts)

        if not self.bound.scores.can_skip_finite:
            store()
            return
        with T.If(m.value <= tirx.const(HIDDEN_BIAS / 2, self.acc)):
            with T.Then():  # a row whose keys are all hidden by a finite mask gives them equal weights
                PlainRow(self.bound, b, h, i).emit()
            with T.Else():
                store()

    def combine_splits(self, m: Expr, before: tuple[Expr, Expr], first: Expr, splits: Expr) -> tuple[Expr, list[Expr]]:
        """Return l = sum w_s l_s and sum w_s O_s / l, with the terms before all keys; m is the maximum."""
        zero, log2_e = tirx.const(0, self.acc), tirx.const(LOG2_E, self.acc)
        m_0, l_0 = before
        shift = let(tirx.Select(m == tirx.const(float("-inf"), self.acc), zero, m))
        l = Register(l_0 * exp2((m_0 - shift) * log2_e))
        o = [Register(splat(0.0, self.Wv, self.acc)) for _ in self.v_starts]
        with T.serial(splits) as s:
            w = exp2((self.m[first + s] - shift) * log2_e)
            l.value += w * self.l[first + s]
            for n, register in enumerate(o):
                weight = splat(w, self.Wv, self.acc)
                register.value += weight * load(self.O, self.Wv, (first + s) * self.stride + n * self.Wv)
        inverse = let(splat(tirx.Select(l.value == zero, zero, tirx.const(1, self.acc) / l.value), self.Wv, self.acc))
        return l.value, [let(register.value * inverse) for register in o]
