"""The plain gradient: unscheduled TensorIR that is correct for every GradientProblem.

The importer emits it, and it is the fallback on any target. Scores are recomputed for each of its three parts: the rows
of dQ, the keys of dK and dV, and the tables. Pairs add to the tables serially, in a fixed order. `GradientCode` is the
code of one row or one key, for one thread or for several that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ...tensorir.regions import full_region
from ..expr.emit import widen_to
from ..record.gradient import BoundGradient, GradientParameters, GradientProblem, TableRead

HeadPosition = tuple[Expr, Expr, Expr]
"""Batch, head, and row or key."""


def build_plain_gradient(gradient: GradientProblem) -> tirx.PrimFunc:
    """Build the PrimFunc with parameters `gradient.parameters()`.

    The values of a masked pair have no effect on any gradient, whatever they are.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("attention_gradient")
        bound = BoundGradient(GradientParameters(gradient))
        p, B, S, keys = bound.problem, bound.bound.B, bound.bound.S, bound.bound.T
        with T.sblock("attention_gradient"):
            T.reads([full_region(bound.buffers[name]) for name in gradient.inputs() if name in bound.buffers])
            T.writes([full_region(bound.buffers[name]) for name in gradient.outputs()])
            with T.parallel(T.int64(1) * B * p.q_heads * S) as n:
                GradientCode(bound).row(unravel_position(n, p.q_heads, S))
            with T.parallel(T.int64(1) * B * p.kv_heads * keys) as n:
                GradientCode(bound).key(unravel_position(n, p.kv_heads, keys))
            if gradient.tables:
                clear_tables(bound)
                with T.serial(B) as b, T.serial(p.q_heads) as h, T.serial(S) as i:
                    GradientCode(bound).tables((b, h, i))
    return builder.get()


def unravel_position(n: Expr, heads: int, length: Expr) -> HeadPosition:
    """Return the position of element n of all batches, heads and rows or keys."""
    size = tirx.max(T.int64(1) * length, T.int64(1))
    b, h, i = (T.bind(x) for x in (n // (size * heads), n // size % heads, n % size))
    return b, h, i


class GradientCode:
    """The code for a row, or for a key.

    A target on which several threads share it overrides the elements of vectors that each has (`vector`, `elements`),
    and the reduction over threads (`total`).
    """

    def __init__(self, bound: BoundGradient) -> None:
        self.bound, self.problem, self.buffers = bound, bound.problem, bound.buffers
        self.scores, self.addressing, self.acc = bound.bound.scores, bound.bound.addressing, bound.problem.acc_dtype
        self.zero = tirx.const(0.0, self.acc)

    def vector(self, size: int) -> tirx.Buffer:
        """Allocate memory for this thread's elements of a vector."""
        return self.bound.bound.scratch(size, self.acc)

    @contextmanager
    def elements(self, size: int) -> Iterator[tuple[Expr, Expr]]:
        """Loop over this thread's elements of a vector; yield the index in its memory and the index in the vector."""
        with T.serial(size) as d:
            yield d, d

    def total(self, value: Expr) -> Expr:
        """Return the sum over the threads."""
        return T.bind(value)

    # Rows, keys and tables.

    def row(self, position: HeadPosition) -> None:
        """Emit dQ_i."""
        b, h, i = position
        dq, delta, hk = self.zeros(self.problem.head_dim), self.delta(b, h, i), T.bind(h // self.problem.group)
        with T.serial(self.bound.bound.T) as j, self.visible(b, h, i, j):
            ds = self.pair(b, h, i, j, delta).ds()
            with self.elements(self.problem.head_dim) as (index, d):
                T.buffer_store(dq, dq[index] + ds * self.addressing.k(b, hk, j, d), [index])
        with self.elements(self.problem.head_dim) as (index, d):
            T.buffer_store(self.buffers["dq"], dq[index] * self.scores.scale, [b, h, i, d])

    def key(self, position: HeadPosition) -> None:
        """Emit dK_j and dV_j."""
        b, hk, j = position
        p, dk, dv = self.problem, self.zeros(self.problem.head_dim), self.zeros(self.problem.v_head_dim)
        with T.serial(p.group) as g, T.serial(self.bound.bound.S) as i:
            h = T.bind(hk * p.group + g)
            with self.visible(b, h, i, j):
                pair = self.pair(b, h, i, j, self.delta(b, h, i))
                ds = pair.ds()
                with self.elements(p.head_dim) as (index, d):
                    T.buffer_store(dk, dk[index] + ds * self.addressing.q(b, h, i, d), [index])
                with self.elements(p.v_head_dim) as (index, d):
                    T.buffer_store(dv, dv[index] + pair.p * self.dy(b, h, i, d), [index])
        with self.elements(p.head_dim) as (index, d):
            T.buffer_store(self.buffers["dk"], dk[index] * self.scores.scale, [b, hk, j, d])
        with self.elements(p.v_head_dim) as (index, d):
            T.buffer_store(self.buffers["dv"], dv[index], [b, hk, j, d])

    def tables(self, position: HeadPosition) -> None:
        """Add the terms of the pairs of a row to the gradients of tables."""
        b, h, i = position
        delta = self.delta(b, h, i)
        with T.serial(self.bound.bound.T) as j, self.visible(b, h, i, j):
            pair = self.pair(b, h, i, j, delta)
            for read in self.bound.reads:
                derivative = tirx.Cast(self.acc, read.derivative(b, h, i, j, pair.s))
                self.add_to_table(read, (b, h, i, j), pair.s, T.bind(pair.dz * derivative))

    # Terms.

    def pair(self, b: Expr, h: Expr, i: Expr, j: Expr, delta: Expr) -> GradientPair:
        hk = T.bind(h // self.problem.group)
        s = self.dot(self.problem.head_dim, lambda d: self.addressing.q(b, h, i, d) * self.addressing.k(b, hk, j, d))
        dp = self.dot(self.problem.v_head_dim, lambda d: self.dy(b, h, i, d) * self.addressing.v(b, hk, j, d))
        return GradientPair(self.bound, (b, h, i, j), s, dp, delta)

    def delta(self, b: Expr, h: Expr, i: Expr) -> Expr:
        """Return dY_i . Y_i."""
        y = self.buffers["y"]
        return self.dot(self.problem.v_head_dim, lambda d: self.dy(b, h, i, d) * widen_to(y[b, h, i, d], self.acc))

    def dy(self, b: Expr, h: Expr, i: Expr, d: Expr) -> Expr:
        """Return an element of dY in acc_dtype."""
        return widen_to(self.buffers["dy"][b, h, i, d], self.acc)

    def dot(self, size: int, term: Callable[[Expr], Expr]) -> Expr:
        """Return the sum of term(d)."""
        total = self.bound.bound.scratch(1, self.acc)
        T.buffer_store(total, self.zero, [0])
        with self.elements(size) as (_, d):
            T.buffer_store(total, total[0] + term(d), [0])
        return self.total(total[0])

    def zeros(self, size: int) -> tirx.Buffer:
        buffer = self.vector(size)
        with self.elements(size) as (index, _):
            T.buffer_store(buffer, self.zero, [index])
        return buffer

    @contextmanager
    def visible(self, b: Expr, h: Expr, i: Expr, j: Expr) -> Iterator[None]:
        """Run the enclosed code for a visible pair."""
        if not self.scores.has_mask:
            yield
            return
        with T.If(self.scores.is_unmasked(b, h, i, j, inside=True)), T.Then():
            yield

    def add_to_table(self, read: TableRead, pair: tuple[Expr, Expr, Expr, Expr], s: Expr, value: Expr) -> None:
        add_to_table(self.bound, read, pair, s, value)


class GradientPair:
    """A visible pair: its scaled dot product s, its P, and dz (gradient.py)."""

    def __init__(
        self, bound: BoundGradient, position: tuple[Expr, Expr, Expr, Expr], score: Expr, dp: Expr, delta: Expr
    ) -> None:
        self.bound, self.position = bound, position
        self.s = T.bind(score * bound.bound.scores.scale)
        modified = bound.bound.scores.apply_score_mod(self.s, *position, inside=True)
        b, h, i, _ = position
        self.p = T.bind(T.exp(modified - bound.buffers["lse"][b, h, i]))
        self.dz = T.bind(self.p * (dp - delta))

    def ds(self) -> Expr:
        """Return the gradient of the scaled dot product."""
        if not self.bound.has_score_mod:
            return self.dz
        slope = self.bound.slope(*self.position, self.s)
        return T.bind(self.dz * tirx.Cast(self.bound.problem.acc_dtype, slope))


def clear_tables(bound: BoundGradient) -> None:
    """Set d table := 0, for all tables."""
    for name in bound.gradient.tables:
        buffer = bound.buffers[f"d_{name}"]
        with T.grid(*buffer.shape) as index:
            T.buffer_store(buffer, tirx.const(0.0, buffer.dtype), [index] if len(buffer.shape) == 1 else list(index))


def add_to_table(
    bound: BoundGradient, read: TableRead, pair: tuple[Expr, Expr, Expr, Expr], s: Expr, value: Expr
) -> None:
    """Add value to d table at the element that a pair with this score reads."""
    buffer = bound.buffers[f"d_{read.table}"]
    index = [T.bind(index_expr(*pair, s)) for index_expr in read.at]
    T.buffer_store(buffer, buffer[tuple(index)] + value, index)
