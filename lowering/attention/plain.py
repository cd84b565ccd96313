"""The plain lowering: unscheduled TensorIR that is right for every problem.

It is what the importer emits, the key under which kernels are chosen and tuned, the fallback on any target,
and what fast kernels are tested against. One query row at a time, with the online softmax of Milakov and
Gimelshein (arXiv:1805.02867): m is the running maximum, l the running sum and o the running output, both
relative to m.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import full_region
from .bound import Bound
from .keys import Range, key_at, length
from .problem import AttentionProblem

PARTIAL_SUMS = 8  # independent sums per dot product, so that it is not one long chain of additions


def plain(problem: AttentionProblem) -> tirx.PrimFunc:
    """The PrimFunc with parameters `problem.parameters()`, of the shapes and types that `Bound` declares.

    Keys and values that a row does not see are never read for it, so that NaN there cannot leak; only qk_mode
    0 and 1 ask for all scores. A row that sees no key, or only keys of score -inf, gives 0.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("attention")
        bound = Bound(problem)
        with T.sblock("attention"):
            outputs = [bound.buffers[name] for name in problem.outputs()]
            T.reads([full_region(buffer) for name, buffer in bound.buffers.items() if name in problem.inputs()])
            T.writes([full_region(buffer) for buffer in outputs])
            rows, heads = tirx.max(bound.S, T.int64(1)), problem.q_heads
            with T.parallel(T.int64(1) * bound.B * heads * bound.S) as row:
                b, h, i = (T.bind(x) for x in (row // (rows * heads), row // rows % heads, row % rows))
                with bound.if_there(b, i):
                    Row(bound, b, h, i).emit()
    return builder.get()


class Row:
    """The code for query row i of head h in batch b.

    A target on which several threads share a row says how: which elements of its vectors each of them has (`elements`),
    how they add up a dot product (`dot`), and which of them writes what all of them know (`alone`).
    """

    def __init__(self, bound: Bound, b: Expr, h: Expr, i: Expr) -> None:
        self.bound, self.problem = bound, bound.problem
        self.b, self.h, self.i = b, h, i
        self.hk = T.bind(h // self.problem.group)
        acc = self.problem.acc_dtype
        self.zero, self.minus_infinity = tirx.const(0.0, acc), tirx.const(float("-inf"), acc)
        self.take([(T.bind(lo), T.bind(hi)) for lo, hi in bound.keys.of_row(b, i)])
        self.q, self.o = self.vector(self.problem.head_dim), self.vector(self.problem.v_head_dim)
        self.m, self.l = bound.scratch(1, acc), bound.scratch(1, acc)

    def take(self, ranges: list[Range]) -> None:
        """These are the keys that the row has to do with."""
        self.ranges, self.count = ranges, T.bind(length(ranges))

    def vector(self, dim: int) -> tirx.Buffer:
        """Memory for this thread's elements of a vector."""
        return self.bound.scratch(dim, self.problem.acc_dtype)

    @contextmanager
    def elements(self, dim: int) -> Iterator[tuple[Expr, Expr]]:
        """A loop over this thread's elements of a vector: where it keeps the element, and which element it is."""
        with T.serial(dim) as d:
            yield d, d

    def before_keys(self) -> tuple[Expr, Expr]:
        """m and l before the first key."""
        return self.bound.scores.before_keys(self.h)

    def alone(self) -> AbstractContextManager[object]:
        """Runs what it encloses in one thread of those that share the row."""
        return nullcontext()

    def emit(self) -> None:
        self.load_query()
        self.online_softmax()
        self.store_y()
        if self.problem.qk_mode is not None:
            self.store_qk(self.problem.qk_mode)

    def load_query(self) -> None:
        """q := scale * Q_i"""
        with self.elements(self.problem.head_dim) as (place, d):
            q = self.bound.addressing.q(self.b, self.h, self.i, d)
            _store(self.q, place, q * self.bound.scores.scale)

    def online_softmax(self) -> None:
        """m := max_j s_j, l := sum_j exp(s_j - m), o := sum_j exp(s_j - m) V_j over the visible keys j.

        A sink is one more s_j in m and l.
        """
        m, l, o = self.m, self.l, self.o
        for buffer, value in zip((m, l), self.before_keys()):
            _store(buffer, 0, value)
        with self.elements(self.problem.v_head_dim) as (place, _):
            _store(o, place, self.zero)
        with self.visible_keys() as j:
            s = T.bind(self.logit(j))
            m_new = T.bind(tirx.max(m[0], s))
            shift = T.bind(self.shift(m_new))
            alpha, p = T.bind(T.exp(m[0] - shift)), T.bind(T.exp(s - shift))
            _store(m, 0, m_new)
            _store(l, 0, l[0] * alpha + p)
            with self.elements(self.problem.v_head_dim) as (place, d):
                _store(o, place, o[place] * alpha + p * self.bound.addressing.v(self.b, self.hk, j, d))

    def store_y(self) -> None:
        """Y_i := o / l, or 0 where l = 0. A NaN in l is no 0 and stays."""
        with self.alone():
            self.bound.addressing.store_ends(self.b, self.h, self.i, self.m[0], self.l[0])
        with self.elements(self.problem.v_head_dim) as (place, d):
            self.bound.addressing.store_y(self.b, self.h, self.i, d, self.normalized(self.o[place]))

    def store_qk(self, mode: int) -> None:
        """The row of the qk output: scores and probabilities are computed again rather than kept."""
        if mode in (0, 1):
            with T.serial(self.bound.T) as j:
                s = self.dot(j)
                changed = s if mode == 0 else self.bound.scores.changed(s, self.b, self.h, self.i, j, inside=True)
                self.put_qk(j, changed)
            return
        with T.serial(self.bound.T) as j:
            self.put_qk(j, self.minus_infinity if mode == 2 else self.zero)
        with self.visible_keys() as j:
            s = self.logit(j)
            p = self.normalized(T.exp(s - self.shift(self.m[0])))
            self.put_qk(j, s if mode == 2 else p)

    @contextmanager
    def visible_keys(self) -> Iterator[Expr]:
        """A loop over the keys j that the row sees."""
        with T.serial(self.count) as n:
            j = T.bind(key_at(self.ranges, n))
            if not self.bound.scores.has_mask:
                yield j
            else:
                with T.If(self.bound.scores.unmasked(self.b, self.h, self.i, j, inside=True)), T.Then():
                    yield j

    def logit(self, j: Expr) -> Expr:
        return self.bound.scores.of(self.dot(j), self.b, self.h, self.i, j, inside=True)

    def dot(self, j: Expr) -> Expr:
        """q . K_j"""
        partial = self.bound.scratch(PARTIAL_SUMS, self.problem.acc_dtype)

        def add(d: Expr, lane: Expr) -> None:
            k = self.bound.addressing.k(self.b, self.hk, j, d)
            _store(partial, lane, partial[lane] + self.q[d] * k)

        with T.unroll(PARTIAL_SUMS) as lane:
            _store(partial, lane, self.zero)
        steps, rest = divmod(self.problem.head_dim, PARTIAL_SUMS)
        with T.serial(steps) as step, T.unroll(PARTIAL_SUMS) as lane:
            add(step * PARTIAL_SUMS + lane, lane)
        with T.unroll(rest) as lane:
            add(steps * PARTIAL_SUMS + lane, lane)
        sums = [partial[lane] for lane in range(PARTIAL_SUMS)]
        while len(sums) > 1:
            sums = [x + y for x, y in zip(sums[::2], sums[1::2], strict=True)]
        return T.bind(sums[0])

    def shift(self, m: Expr) -> Expr:
        """What the exponents are relative to: m, but 0 where m = -inf, so that -inf - m is no NaN."""
        return tirx.Select(tirx.EQ(m, self.minus_infinity), self.zero, m)

    def normalized(self, value: Expr) -> Expr:
        return tirx.Select(tirx.EQ(self.l[0], self.zero), self.zero, value / self.l[0])

    def put_qk(self, j: Expr, value: Expr) -> None:
        with self.alone():
            self.bound.addressing.store_qk(self.b, self.h, self.i, j, value)


def _store(buffer: tirx.Buffer, index: Expr | int, value: Expr) -> None:
    T.buffer_store(buffer, value, [index])
