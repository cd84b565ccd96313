"""Attention for every problem: the plain lowering, a warp for each query row. What no faster kernel serves, this does.

A lane keeps every 32nd element of q and o in registers, so that a warp reads a row of K or V in one go; a dot product
is added up by shuffles, after which every lane knows it. Several keys are asked for at once; those among them that the
row does not see are selected away.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.keys import key_at
from lowering.attention.plain import Row

from .decode_tiles import RowTiles
from .lanes import lane_elements, per_lane
from .ptx import WARP, let, put, registers, shuffle_xor


def plain(bound: Bound, tiles: RowTiles) -> None:
    """Emits the kernel, with its launch, into the PrimFunc that `bound` has opened. Any problem."""
    heads = bound.problem.q_heads
    rows = T.int64(1) * bound.B * heads * bound.S
    with (
        T.launch_thread("blockIdx.x", tirx.max(tirx.ceildiv(rows, tiles.block), T.int64(1))) as block,
        T.launch_thread("threadIdx.x", tiles.block * WARP) as thread,
    ):
        row = let(block.astype("int64") * tiles.block + thread // WARP)
        with T.If(row < rows), T.Then():
            head, i = let(tirx.truncdiv(row, bound.S)), let(tirx.truncmod(row, bound.S))
            b, h = let(tirx.truncdiv(head, heads)), let(tirx.truncmod(head, heads))
            with bound.if_there(b, i):
                WarpRow(bound, b, h, i, let(thread % WARP), tiles.keys).emit()


class WarpRow(Row):
    """The code for query row i of head h in batch b, run by the 32 lanes of a warp, with so many keys at once."""

    def __init__(self, bound: Bound, b: Expr, h: Expr, i: Expr, lane: Expr, at_once: int) -> None:
        self.lane, self.at_once = lane, at_once
        super().__init__(bound, b, h, i)
        self.take([(let(lo), let(hi)) for lo, hi in self.ranges])

    def vector(self, dim: int) -> tirx.Buffer:
        return self.bound.scratch(per_lane(dim), self.problem.acc_dtype)

    @contextmanager
    def elements(self, dim: int) -> Iterator[tuple[Expr, Expr]]:
        with lane_elements(dim, self.lane) as place:
            yield place

    def alone(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(T.If(self.lane == 0))
        stack.enter_context(T.Then())
        return stack

    def put_qk(self, j: Expr, value: Expr) -> None:
        super().put_qk(j, let(value))  # an infinite constant of 16 bits is no C++ in TVM 0.27

    def logit(self, j: Expr) -> Expr:
        return T.bind(let(super().logit(j)))

    def online_softmax(self) -> None:
        """As in `Row`, for several keys at once: none of them has to wait for the others' way through memory."""
        m, l, o = self.m, self.l, self.o
        for buffer, value in zip((m, l), self.before_keys()):
            put(buffer, 0, value)
        with self.elements(self.problem.v_head_dim) as (place, _):
            put(o, place, self.zero)
        with T.serial(tirx.truncdiv(self.count + (self.at_once - 1), self.at_once)) as step:
            first = let(step * self.at_once)
            keys = [let(key_at(self.ranges, tirx.min(first + k, self.count - 1))) for k in range(self.at_once)]
            visible = [let(self.is_visible(first + k, key)) for k, key in enumerate(keys)]
            scores = []
            for key, seen, s in zip(keys, visible, self.dots(keys)):
                logit = self.bound.scores.of(s, self.b, self.h, self.i, key, inside=True)
                scores.append(let(tirx.Select(seen, let(logit), self.minus_infinity)))
            m_new = let(functools.reduce(tirx.max, scores, m[0]))
            shift = let(self.shift(m_new))
            alpha, p = let(T.exp(m[0] - shift)), [let(T.exp(s - shift)) for s in scores]
            put(m, 0, m_new)
            put(l, 0, sum(p, l[0] * alpha))
            with self.elements(self.problem.v_head_dim) as (place, d):
                # What the row does not see may be NaN.
                v = [self.bound.addressing.v(self.b, self.hk, j, d) for j in keys]
                values = [tirx.Select(seen, x, self.zero) for x, seen in zip(v, visible)]
                put(o, place, sum((x * y for x, y in zip(p, values)), o[place] * alpha))

    def is_visible(self, n: Expr, key: Expr) -> Expr:
        """Whether there is a key number n and the row sees it; `key` is that, or the last one."""
        if not self.bound.scores.has_mask:
            return n < self.count
        return tirx.all(n < self.count, self.bound.scores.unmasked(self.b, self.h, self.i, key, inside=True))

    def dot(self, j: Expr) -> Expr:
        return self.dots([j])[0]

    def dots(self, keys: list[Expr]) -> list[Expr]:
        """q . K_j for each key."""
        totals = registers(len(keys), self.problem.acc_dtype)
        for k in range(len(keys)):
            put(totals, k, self.zero)
        with self.elements(self.problem.head_dim) as (place, d):
            for k, j in enumerate(keys):
                put(totals, k, totals[k] + self.q[place] * self.bound.addressing.k(self.b, self.hk, j, d))
        for lanes in (16, 8, 4, 2, 1):
            for k in range(len(keys)):
                put(totals, k, totals[k] + shuffle_xor(totals[k], lanes))
        return [T.bind(totals[k]) for k in range(len(keys))]
