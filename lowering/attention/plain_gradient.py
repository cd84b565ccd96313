"""The plain gradient: unscheduled TensorIR that is right for every GradientProblem.

It is what the importer emits and the fallback on any target. Scores are computed again for each of its three parts: the
rows of dQ, the keys of dK and dV, and the tables, to which pairs add in an order of their own, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..tensorir.regions import whole
from .expr.emit import widened
from .gradient import BoundGradient, GradientParameters, GradientProblem, Read


def plain_gradient(gradient: GradientProblem) -> tirx.PrimFunc:
    """The PrimFunc with parameters `gradient.parameters()`.

    What a pair that is not visible holds has no part in any gradient, whatever it is.
    """
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("attention_gradient")
        bound = BoundGradient(GradientParameters(gradient))
        with T.sblock("attention_gradient"):
            T.reads([whole(bound.buffers[name]) for name in gradient.inputs() if name in bound.buffers])
            T.writes([whole(bound.buffers[name]) for name in gradient.outputs()])
            _rows(bound)
            _keys(bound)
            if gradient.tables:
                _tables(bound)
    return builder.get()


class Pair:
    """The code for a pair of query row and key: its P, and dz (gradient.py)."""

    def __init__(self, bound: BoundGradient, b: Expr, h: Expr, i: Expr, j: Expr, delta: Expr) -> None:
        self.bound, self.problem = bound, bound.problem
        self.b, self.h, self.i, self.j = b, h, i, j
        self.hk = T.bind(h // self.problem.group)
        places, acc = bound.bound.places, self.problem.acc_dtype
        s, dp = (bound.bound.scratch(1, acc) for _ in range(2))
        for total in (s, dp):
            T.buffer_store(total, tirx.const(0.0, acc), [0])
        with T.serial(self.problem.head_dim) as d:
            T.buffer_store(s, s[0] + places.q(b, h, i, d) * places.k(b, self.hk, j, d), [0])
        with T.serial(self.problem.v_head_dim) as d:
            T.buffer_store(dp, dp[0] + row_gradient(bound, b, h, i, d) * places.v(b, self.hk, j, d), [0])
        self.s = T.bind(s[0] * bound.bound.scores.scale)
        score = bound.bound.scores.changed(self.s, b, h, i, j, inside=True)
        self.p = T.bind(T.exp(score - bound.buffers["lse"][b, h, i]))
        self.dz = T.bind(self.p * (dp[0] - delta))

    def ds(self) -> Expr:
        """The gradient of the scaled product."""
        if not self.bound.changes:
            return self.dz
        slope = self.bound.slope(self.b, self.h, self.i, self.j, self.s)
        return T.bind(self.dz * tirx.Cast(self.problem.acc_dtype, slope))


def row_gradient(bound: BoundGradient, b: Expr, h: Expr, i: Expr, d: Expr) -> Expr:
    """An element of dY in acc_dtype."""
    return widened(bound.buffers["dy"][b, h, i, d], bound.problem.acc_dtype)


def delta_of(bound: BoundGradient, b: Expr, h: Expr, i: Expr) -> Expr:
    """dY_i . Y_i; emits a loop."""
    acc = bound.problem.acc_dtype
    total = bound.bound.scratch(1, acc)
    T.buffer_store(total, tirx.const(0.0, acc), [0])
    with T.serial(bound.problem.v_head_dim) as d:
        y = widened(bound.buffers["y"][b, h, i, d], acc)
        T.buffer_store(total, total[0] + row_gradient(bound, b, h, i, d) * y, [0])
    return T.bind(total[0])


@contextmanager
def visible(bound: BoundGradient, b: Expr, h: Expr, i: Expr, j: Expr) -> Iterator[None]:
    """Runs what it encloses for a pair that is visible."""
    if not bound.bound.scores.has_mask:
        yield
        return
    with T.If(bound.bound.scores.unmasked(b, h, i, j, inside=True)), T.Then():
        yield


def _zeros(bound: BoundGradient, size: int) -> tirx.Buffer:
    buffer = bound.bound.scratch(size, bound.problem.acc_dtype)
    with T.serial(size) as d:
        T.buffer_store(buffer, tirx.const(0.0, bound.problem.acc_dtype), [d])
    return buffer


def _rows(bound: BoundGradient) -> None:
    p, S, places = bound.problem, bound.bound.S, bound.bound.places
    rows = tirx.max(T.int64(1) * S, T.int64(1))
    with T.parallel(T.int64(1) * bound.bound.B * p.q_heads * S) as row:
        b, h, i = (T.bind(x) for x in (row // (rows * p.q_heads), row // rows % p.q_heads, row % rows))
        dq, delta = _zeros(bound, p.head_dim), delta_of(bound, b, h, i)
        with T.serial(bound.bound.T) as j, visible(bound, b, h, i, j):
            pair = Pair(bound, b, h, i, j, delta)
            ds = pair.ds()
            with T.serial(p.head_dim) as d:
                T.buffer_store(dq, dq[d] + ds * places.k(b, pair.hk, j, d), [d])
        with T.serial(p.head_dim) as d:
            T.buffer_store(bound.buffers["dq"], dq[d] * bound.bound.scores.scale, [b, h, i, d])


def _keys(bound: BoundGradient) -> None:
    p, keys, places = bound.problem, bound.bound.T, bound.bound.places
    most = tirx.max(T.int64(1) * keys, T.int64(1))
    with T.parallel(T.int64(1) * bound.bound.B * p.kv_heads * keys) as key:
        b, hk, j = (T.bind(x) for x in (key // (most * p.kv_heads), key // most % p.kv_heads, key % most))
        dk, dv = _zeros(bound, p.head_dim), _zeros(bound, p.v_head_dim)
        with T.serial(p.group) as g, T.serial(bound.bound.S) as i:
            h = T.bind(hk * p.group + g)
            with visible(bound, b, h, i, j):
                pair = Pair(bound, b, h, i, j, delta_of(bound, b, h, i))
                ds = pair.ds()
                with T.serial(p.head_dim) as d:
                    T.buffer_store(dk, dk[d] + ds * places.q(b, h, i, d), [d])
                with T.serial(p.v_head_dim) as d:
                    T.buffer_store(dv, dv[d] + pair.p * row_gradient(bound, b, h, i, d), [d])
        with T.serial(p.head_dim) as d:
            T.buffer_store(bound.buffers["dk"], dk[d] * bound.bound.scores.scale, [b, hk, j, d])
        with T.serial(p.v_head_dim) as d:
            T.buffer_store(bound.buffers["dv"], dv[d], [b, hk, j, d])


def _tables(bound: BoundGradient) -> None:
    p = bound.problem
    clear_tables(bound)
    with T.serial(bound.bound.B) as b, T.serial(p.q_heads) as h, T.serial(bound.bound.S) as i:
        delta = delta_of(bound, b, h, i)
        with T.serial(bound.bound.T) as j, visible(bound, b, h, i, j):
            pair = Pair(bound, b, h, i, j, delta)
            for read in bound.reads:
                part = tirx.Cast(p.acc_dtype, read.part(b, h, i, j, pair.s))
                add_to_table(bound, read, (b, h, i, j), pair.s, pair.dz * part)


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
