"""The plain lowering: unscheduled TensorIR that is correct for every problem.

The importer emits it. It is the key under which kernels are chosen and tuned, the fallback on any target, and the
reference for tests of fast kernels. It processes one query row at a time, with the online softmax of Milakov and
Gimelshein (arXiv:1805.02867): m is the running maximum, l the running sum and o the running output, both relative to m.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...tensorir.regions import full_region
from ..record.problem import AttentionProblem
from .bound import BoundAttention
from .key_ranges import KeyRange, count_keys, select_key

PARTIAL_ACCUMULATORS = 8  # independent accumulators per dot product, so that it is not one long chain of additions


def build_plain_attention(problem: AttentionProblem) -> tirx.PrimFunc:
    """Build the PrimFunc with parameters `problem.parameters()`, of the shapes and types that `BoundAttention`
    declares.

    Keys and values that a row does not see are never read for it, so that NaN there cannot leak; only qk_mode 0 and 1
    request all scores. A row that sees no key, or only keys of score -inf, gives 0.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("attention")
        bound = BoundAttention(problem)
        with T.sblock("attention"):
            outputs = [bound.buffers[name] for name in problem.outputs()]
            T.reads([full_region(buffer) for name, buffer in bound.buffers.items() if name in problem.inputs()])
            T.writes([full_region(buffer) for buffer in outputs])
            rows, heads = tirx.max(bound.S, T.int64(1)), problem.q_heads
            with T.parallel(T.int64(1) * bound.B * heads * bound.S) as row:
                b, h, i = (T.bind(x) for x in (row // (rows * heads), row // rows % heads, row % rows))
                with bound.guard_row(b, i):
                    PlainRow(bound, b, h, i).emit()
    return builder.get()


class PlainRow:
    """The code for query row i of head h in batch b.

    A target on which several threads share a row overrides three methods: the elements of vectors that each thread has
    (`elements`), the reduction of a dot product (`dot`), and the thread that writes results common to all
    (`guard_one_thread`).
    """

    def __init__(self, bound: BoundAttention, b: Expr, h: Expr, i: Expr) -> None:
        self.bound, self.problem = bound, bound.problem
        self.b, self.h, self.i = b, h, i
        self.hk = T.bind(h // self.problem.group)
        acc = self.problem.acc_dtype
        self.zero, self.minus_infinity = tirx.const(0.0, acc), tirx.const(float("-inf"), acc)
        self.set_ranges([(T.bind(lo), T.bind(hi)) for lo, hi in bound.keys.compute_row_ranges(b, i)])
        self.q, self.o = self.vector(self.problem.head_dim), self.vector(self.problem.v_head_dim)
        self.m, self.l = bound.scratch(1, acc), bound.scratch(1, acc)

    def set_ranges(self, ranges: list[KeyRange]) -> None:
        """Set the ranges of keys that the row processes."""
        self.ranges, self.count = ranges, T.bind(count_keys(ranges))

    def vector(self, dim: int) -> tirx.Buffer:
        """Allocate memory for this thread's elements of a vector."""
        return self.bound.scratch(dim, self.problem.acc_dtype)

    @contextmanager
    def elements(self, dim: int) -> Iterator[tuple[Expr, Expr]]:
        """Loop over this thread's elements of a vector; yield the index in its memory and the index in the vector."""
        with T.serial(dim) as d:
            yield d, d

    def compute_initial_statistics(self) -> tuple[Expr, Expr]:
        """Return m and l before the first key."""
        return self.bound.scores.compute_initial_statistics(self.h)

    def guard_one_thread(self) -> AbstractContextManager[object]:
        """Run the enclosed code in one of the threads that share the row."""
        return nullcontext()

    def emit(self) -> None:
        self.load_query()
        self.online_softmax()
        self.store_y()
        if self.problem.qk_mode is not None:
            self.store_qk(self.problem.qk_mode)

    def load_query(self) -> None:
        """Load q := scale * Q_i."""
        with self.elements(self.problem.head_dim) as (index, d):
            q = self.bound.addressing.q(self.b, self.h, self.i, d)
            _store(self.q, index, q * self.bound.scores.scale)

    def online_softmax(self) -> None:
        """Compute m := max_j s_j, l := sum_j exp(s_j - m), o := sum_j exp(s_j - m) V_j over the visible keys j.

        A sink is one more s_j in m and l.
        """
        m, l, o = self.m, self.l, self.o
        for buffer, value in zip((m, l), self.compute_initial_statistics()):
            _store(buffer, 0, value)
        with self.elements(self.problem.v_head_dim) as (index, _):
            _store(o, index, self.zero)
        with self.visible_keys() as j:
            s = T.bind(self.logit(j))
            m_new = T.bind(tirx.max(m[0], s))
            shift = T.bind(self.shift(m_new))
            alpha, p = T.bind(T.exp(m[0] - shift)), T.bind(T.exp(s - shift))
            _store(m, 0, m_new)
            _store(l, 0, l[0] * alpha + p)
            with self.elements(self.problem.v_head_dim) as (index, d):
                _store(o, index, o[index] * alpha + p * self.bound.addressing.v(self.b, self.hk, j, d))

    def store_y(self) -> None:
        """Store Y_i := o / l, or 0 where l = 0. A NaN in l is not 0 and propagates."""
        with self.guard_one_thread():
            self.bound.addressing.store_statistics(self.b, self.h, self.i, self.m[0], self.l[0])
        with self.elements(self.problem.v_head_dim) as (index, d):
            self.bound.addressing.store_y(self.b, self.h, self.i, d, self.normalize(self.o[index]))

    def store_qk(self, mode: int) -> None:
        """Store the row of the qk output: scores and probabilities are recomputed rather than stored."""
        if mode in (0, 1):
            with T.serial(self.bound.T) as j:
                s = self.dot(j)
                score = s if mode == 0 else self.bound.scores.apply_score_mod(s, self.b, self.h, self.i, j, inside=True)
                self.store_qk_element(j, score)
            return
        with T.serial(self.bound.T) as j:
            self.store_qk_element(j, self.minus_infinity if mode == 2 else self.zero)
        with self.visible_keys() as j:
            s = self.logit(j)
            p = self.normalize(T.exp(s - self.shift(self.m[0])))
            self.store_qk_element(j, s if mode == 2 else p)

    @contextmanager
    def visible_keys(self) -> Iterator[Expr]:
        """Loop over the keys j that the row sees."""
        with T.serial(self.count) as n:
            j = T.bind(select_key(self.ranges, n))
            if not self.bound.scores.has_mask:
                yield j
            else:
                with T.If(self.bound.scores.is_unmasked(self.b, self.h, self.i, j, inside=True)), T.Then():
                    yield j

    def logit(self, j: Expr) -> Expr:
        return self.bound.scores.compute_logit(self.dot(j), self.b, self.h, self.i, j, inside=True)

    def dot(self, j: Expr) -> Expr:
        """Return q . K_j."""
        partial = self.bound.scratch(PARTIAL_ACCUMULATORS, self.problem.acc_dtype)

        def add(d: Expr, lane: Expr) -> None:
            k = self.bound.addressing.k(self.b, self.hk, j, d)
            _store(partial, lane, partial[lane] + self.q[d] * k)

        with T.unroll(PARTIAL_ACCUMULATORS) as lane:
            _store(partial, lane, self.zero)
        steps, rest = divmod(self.problem.head_dim, PARTIAL_ACCUMULATORS)
        with T.serial(steps) as step, T.unroll(PARTIAL_ACCUMULATORS) as lane:
            add(step * PARTIAL_ACCUMULATORS + lane, lane)
        with T.unroll(rest) as lane:
            add(steps * PARTIAL_ACCUMULATORS + lane, lane)
        accumulators = [partial[lane] for lane in range(PARTIAL_ACCUMULATORS)]
        while len(accumulators) > 1:
            accumulators = [x + y for x, y in zip(accumulators[::2], accumulators[1::2], strict=True)]
        return T.bind(accumulators[0])

    def shift(self, m: Expr) -> Expr:
        """Return the shift of the exponents: m, but 0 where m = -inf, so that -inf - m is not NaN."""
        return tirx.Select(tirx.EQ(m, self.minus_infinity), self.zero, m)

    def normalize(self, value: Expr) -> Expr:
        return tirx.Select(tirx.EQ(self.l[0], self.zero), self.zero, value / self.l[0])

    def store_qk_element(self, j: Expr, value: Expr) -> None:
        with self.guard_one_thread():
            self.bound.addressing.store_qk(self.b, self.h, self.i, j, value)


def _store(buffer: tirx.Buffer, index: Expr | int, value: Expr) -> None:
    T.buffer_store(buffer, value, [index])
