"""Attention for every problem: the plain lowering, with a warp for each query row.

It serves all problems that no faster kernel accepts. A lane has every 32nd element of q and o in registers, so that a
warp reads a row of K or V in one access. A dot product is reduced by shuffles, after which every lane has it. Several
keys are loaded at once; those that the row does not see are selected away.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.bound import BoundAttention
from lowering.attention.codegen.key_ranges import select_key
from lowering.attention.codegen.plain import PlainRow

from ..primitives.lanes import lane_elements, per_lane
from ..primitives.ptx import WARP, alloc_registers, let, shuffle_xor, store_element
from ..primitives.threads import launch_warps
from .decode_tiles import RowTiles


def plain(bound: BoundAttention, tiles: RowTiles) -> None:
    """Emit the kernel and its launch into the PrimFunc opened by `bound`, for any problem."""
    heads = bound.problem.q_heads
    rows = T.int64(1) * bound.B * heads * bound.S
    with launch_warps(rows, tiles.block) as (row, thread):
        head, i = let(tirx.truncdiv(row, bound.S)), let(tirx.truncmod(row, bound.S))
        b, h = let(tirx.truncdiv(head, heads)), let(tirx.truncmod(head, heads))
        with bound.guard_row(b, i):
            WarpRow(bound, b, h, i, let(thread % WARP), tiles.keys).emit()


class WarpRow(PlainRow):
    """The code for query row i of head h in batch b, run by the 32 lanes of a warp, with `at_once` keys at once."""

    def __init__(self, bound: BoundAttention, b: Expr, h: Expr, i: Expr, lane: Expr, at_once: int) -> None:
        self.lane, self.at_once = lane, at_once
        super().__init__(bound, b, h, i)
        self.set_ranges([(let(lo), let(hi)) for lo, hi in self.ranges])

    def vector(self, dim: int) -> tirx.Buffer:
        return self.bound.scratch(per_lane(dim), self.problem.acc_dtype)

    @contextmanager
    def elements(self, dim: int) -> Iterator[tuple[Expr, Expr]]:
        with lane_elements(dim, self.lane) as slot:
            yield slot

    def guard_one_thread(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(T.If(self.lane == 0))
        stack.enter_context(T.Then())
        return stack

    def store_qk_element(self, j: Expr, value: Expr) -> None:
        super().store_qk_element(j, let(value))  # an infinite constant of 16 bits is not valid C++ in TVM 0.27

    def logit(self, j: Expr) -> Expr:
        return T.bind(let(super().logit(j)))

    def online_softmax(self) -> None:
        """Emit the softmax of `Row` for several keys at once, so that their loads overlap."""
        m, l, o = self.m, self.l, self.o
        for buffer, value in zip((m, l), self.compute_initial_statistics()):
            store_element(buffer, 0, value)
        with self.elements(self.problem.v_head_dim) as (slot, _):
            store_element(o, slot, self.zero)
        with T.serial(tirx.truncdiv(self.count + (self.at_once - 1), self.at_once)) as step:
            first = let(step * self.at_once)
            keys = [let(select_key(self.ranges, tirx.min(first + k, self.count - 1))) for k in range(self.at_once)]
            visible = [let(self.is_visible(first + k, key)) for k, key in enumerate(keys)]
            scores = []
            for key, seen, s in zip(keys, visible, self.dots(keys)):
                logit = self.bound.scores.compute_logit(s, self.b, self.h, self.i, key, inside=True)
                scores.append(let(tirx.Select(seen, let(logit), self.minus_infinity)))
            m_new = let(functools.reduce(tirx.max, scores, m[0]))
            shift = let(self.shift(m_new))
            alpha, p = let(T.exp(m[0] - shift)), [let(T.exp(s - shift)) for s in scores]
            store_element(m, 0, m_new)
            store_element(l, 0, sum(p, l[0] * alpha))
            with self.elements(self.problem.v_head_dim) as (slot, d):
                # Values that the row does not see may be NaN.
                v = [self.bound.addressing.v(self.b, self.hk, j, d) for j in keys]
                values = [tirx.Select(seen, x, self.zero) for x, seen in zip(v, visible)]
                store_element(o, slot, sum((x * y for x, y in zip(p, values)), o[slot] * alpha))

    def is_visible(self, n: Expr, key: Expr) -> Expr:
        """Return whether key number n exists and the row sees it; `key` is that key, or the last one."""
        if not self.bound.scores.has_mask:
            return n < self.count
        return tirx.all(n < self.count, self.bound.scores.is_unmasked(self.b, self.h, self.i, key, inside=True))

    def dot(self, j: Expr) -> Expr:
        return self.dots([j])[0]

    def dots(self, keys: list[Expr]) -> list[Expr]:
        """Return q . K_j for each key."""
        totals = alloc_registers(len(keys), self.problem.acc_dtype)
        for k in range(len(keys)):
            store_element(totals, k, self.zero)
        with self.elements(self.problem.head_dim) as (slot, d):
            for k, j in enumerate(keys):
                store_element(totals, k, totals[k] + self.q[slot] * self.bound.addressing.k(self.b, self.hk, j, d))
        for lanes in (16, 8, 4, 2, 1):
            for k in range(len(keys)):
                store_element(totals, k, totals[k] + shuffle_xor(totals[k], lanes))
        return [T.bind(totals[k]) for k in range(len(keys))]
