"""The plain gradient: unscheduled TensorIR that is right for every GradientProblem.

It is what the importer emits and the fallback on any target. Scores are computed again for each of its three parts: the
rows of dQ, the keys of dK and dV, and the tables, to which pairs add in an order of their own, one after the other.
`Part` is the code of one row or one key, for one thread or for several that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import full_region
from .expr.emit import widened
from .gradient import BoundGradient, GradientParameters, GradientProblem, Read

Place = tuple[Expr, Expr, Expr]
"""Batch, head, and row or key."""


def plain_gradient(gradient: GradientProblem) -> tirx.PrimFunc:
    """The PrimFunc with parameters `gradient.parameters()`.

    What a pair that is not visible holds has no part in any gradient, whatever it is.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("attention_gradient")
        bound = BoundGradient(GradientParameters(gradient))
        p, B, S, keys = bound.problem, bound.bound.B, bound.bound.S, bound.bound.T
        with T.sblock("attention_gradient"):
            T.reads([full_region(bound.buffers[name]) for name in gradient.inputs() if name in bound.buffers])
            T.writes([full_region(bound.buffers[name]) for name in gradient.outputs()])
            with T.parallel(T.int64(1) * B * p.q_heads * S) as n:
                Part(bound).row(unravelled(n, p.q_heads, S))
            with T.parallel(T.int64(1) * B * p.kv_heads * keys) as n:
                Part(bound).key(unravelled(n, p.kv_heads, keys))
            if gradient.tables:
                clear_tables(bound)
                with T.serial(B) as b, T.serial(p.q_heads) as h, T.serial(S) as i:
                    Part(bound).tables((b, h, i))
    return builder.get()


def unravelled(n: Expr, heads: int, length: Expr) -> Place:
    """Element n of all batches, heads and rows or keys."""
    most = tirx.max(T.int64(1) * length, T.int64(1))
    b, h, i = (T.bind(x) for x in (n // (most * heads), n // most % heads, n % most))
    return b, h, i


class Part:
    """The code for a row, or for a key. Where several threads share it, a target says which elements of vectors each
    has (`vector`, `elements`), and how they add up (`total`)."""

    def __init__(self, bound: BoundGradient) -> None:
        self.bound, self.problem, self.buffers = bound, bound.problem, bound.buffers
        self.scores, self.addressing, self.acc = bound.bound.scores, bound.bound.addressing, bound.problem.acc_dtype
        self.zero = tirx.const(0.0, self.acc)

    def vector(self, size: int) -> tirx.Buffer:
        """Memory for this thread's elements of a vector."""
        return self.bound.bound.scratch(size, self.acc)

    @contextmanager
    def elements(self, size: int) -> Iterator[tuple[Expr, Expr]]:
        """A loop over this thread's elements of a vector: where it keeps the element, and which element it is."""
        with T.serial(size) as d:
            yield d, d

    def total(self, value: Expr) -> Expr:
        """The sum over the threads."""
        return T.bind(value)

    # The three parts.

    def row(self, place: Place) -> None:
        """dQ_i"""
        b, h, i = place
        dq, delta, hk = self.zeros(self.problem.head_dim), self.delta(b, h, i), T.bind(h // self.problem.group)
        with T.serial(self.bound.bound.T) as j, self.visible(b, h, i, j):
            ds = self.pair(b, h, i, j, delta).ds()
            with self.elements(self.problem.head_dim) as (at, d):
                T.buffer_store(dq, dq[at] + ds * self.addressing.k(b, hk, j, d), [at])
        with self.elements(self.problem.head_dim) as (at, d):
            T.buffer_store(self.buffers["dq"], dq[at] * self.scores.scale, [b, h, i, d])

    def key(self, place: Place) -> None:
        """dK_j and dV_j"""
        b, hk, j = place
        p, dk, dv = self.problem, self.zeros(self.problem.head_dim), self.zeros(self.problem.v_head_dim)
        with T.serial(p.group) as g, T.serial(self.bound.bound.S) as i:
            h = T.bind(hk * p.group + g)
            with self.visible(b, h, i, j):
                pair = self.pair(b, h, i, j, self.delta(b, h, i))
                ds = pair.ds()
                with self.elements(p.head_dim) as (at, d):
                    T.buffer_store(dk, dk[at] + ds * self.addressing.q(b, h, i, d), [at])
                with self.elements(p.v_head_dim) as (at, d):
                    T.buffer_store(dv, dv[at] + pair.p * self.dy(b, h, i, d), [at])
        with self.elements(p.head_dim) as (at, d):
            T.buffer_store(self.buffers["dk"], dk[at] * self.scores.scale, [b, hk, j, d])
        with self.elements(p.v_head_dim) as (at, d):
            T.buffer_store(self.buffers["dv"], dv[at], [b, hk, j, d])

    def tables(self, place: Place) -> None:
        """What the pairs of a row add to the gradients of tables."""
        b, h, i = place
        delta = self.delta(b, h, i)
        with T.serial(self.bound.bound.T) as j, self.visible(b, h, i, j):
            pair = self.pair(b, h, i, j, delta)
            for read in self.bound.reads:
                part = tirx.Cast(self.acc, read.part(b, h, i, j, pair.s))
                self.add_to_table(read, (b, h, i, j), pair.s, T.bind(pair.dz * part))

    # What they are made of.

    def pair(self, b: Expr, h: Expr, i: Expr, j: Expr, delta: Expr) -> Pair:
        hk = T.bind(h // self.problem.group)
        s = self.dot(self.problem.head_dim, lambda d: self.addressing.q(b, h, i, d) * self.addressing.k(b, hk, j, d))
        dp = self.dot(self.problem.v_head_dim, lambda d: self.dy(b, h, i, d) * self.addressing.v(b, hk, j, d))
        return Pair(self.bound, (b, h, i, j), s, dp, delta)

    def delta(self, b: Expr, h: Expr, i: Expr) -> Expr:
        """dY_i . Y_i"""
        y = self.buffers["y"]
        return self.dot(self.problem.v_head_dim, lambda d: self.dy(b, h, i, d) * widened(y[b, h, i, d], self.acc))

    def dy(self, b: Expr, h: Expr, i: Expr, d: Expr) -> Expr:
        """An element of dY in acc_dtype."""
        return widened(self.buffers["dy"][b, h, i, d], self.acc)

    def dot(self, size: int, term: Callable[[Expr], Expr]) -> Expr:
        """The sum of term(d)."""
        total = self.bound.bound.scratch(1, self.acc)
        T.buffer_store(total, self.zero, [0])
        with self.elements(size) as (_, d):
            T.buffer_store(total, total[0] + term(d), [0])
        return self.total(total[0])

    def zeros(self, size: int) -> tirx.Buffer:
        buffer = self.vector(size)
        with self.elements(size) as (at, _):
            T.buffer_store(buffer, self.zero, [at])
        return buffer

    @contextmanager
    def visible(self, b: Expr, h: Expr, i: Expr, j: Expr) -> Iterator[None]:
        """Runs what it encloses for a pair that is visible."""
        if not self.scores.has_mask:
            yield
            return
        with T.If(self.scores.unmasked(b, h, i, j, inside=True)), T.Then():
            yield

    def add_to_table(self, read: Read, pair: tuple[Expr, Expr, Expr, Expr], s: Expr, value: Expr) -> None:
        add_to_table(self.bound, read, pair, s, value)


class Pair:
    """A visible pair: its scaled product s, its P, and dz (gradient.py)."""

    def __init__(
        self, bound: BoundGradient, place: tuple[Expr, Expr, Expr, Expr], product: Expr, dp: Expr, delta: Expr
    ) -> None:
        self.bound, self.place = bound, place
        self.s = T.bind(product * bound.bound.scores.scale)
        score = bound.bound.scores.changed(self.s, *place, inside=True)
        b, h, i, _ = place
        self.p = T.bind(T.exp(score - bound.buffers["lse"][b, h, i]))
        self.dz = T.bind(self.p * (dp - delta))

    def ds(self) -> Expr:
        """The gradient of the scaled product."""
        if not self.bound.changes:
            return self.dz
        slope = self.bound.slope(*self.place, self.s)
        return T.bind(self.dz * tirx.Cast(self.bound.problem.acc_dtype, slope))


def clear_tables(bound: BoundGradient) -> None:
    """d table := 0, for all of them."""
    for name in bound.gradient.tables:
        buffer = bound.buffers[f"d_{name}"]
        with T.grid(*buffer.shape) as index:
            T.buffer_store(buffer, tirx.const(0.0, buffer.dtype), [index] if len(buffer.shape) == 1 else list(index))


def add_to_table(bound: BoundGradient, read: Read, pair: tuple[Expr, Expr, Expr, Expr], s: Expr, value: Expr) -> None:
    """d table := d table + value, where a pair with this score reads it."""
    buffer = bound.buffers[f"d_{read.table}"]
    index = [T.bind(at(*pair, s)) for at in read.at]
    T.buffer_store(buffer, buffer[tuple(index)] + value, index)
