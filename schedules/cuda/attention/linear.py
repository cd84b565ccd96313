"""Linear attention on GPUs: the state is in registers, and tokens are processed one by one.

    for each batch, head of the state and share of its columns, in blocks; for each column, in 8 lanes of a warp:
        for each token:     u = beta (v - S^T (a k)),  S = a S + k u,  y = scale S^T q

Columns of the state are independent. A lane has every eighth row of a column, so that lanes reduce by shuffles, and
threads wait only for their warp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.expr.emit import cast, widen_to
from lowering.attention.linear import ACC, ATTRIBUTE, BoundLinearAttention, LinearAttention, LinearSequence

from ...tiles import Space, Tiles
from ...variant import Variant
from ..primitives.device import Device, device
from ..primitives.ptx import WARP, alloc_registers, let, shuffle_xor, store_element, unrolled

_LANES = 8  # of a column
_LARGEST_HEAD = 64 * _LANES  # whose share of a column fits a thread's registers


@dataclass(frozen=True)
class LinearTiles(Tiles):
    """Tiles of `linear`."""

    warps: int = 4
    """Warps per block, each with four columns."""

    @classmethod
    def space(cls, problem: LinearAttention, device: Device) -> Space:
        return {"warps": (1, 2, 4, 8)}

    def rules(self, problem: LinearAttention, device: Device) -> dict[str, bool]:
        return {f"warps = {self.warps} must be 1 to 32": self.warps in range(1, 33)}


def linear(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return the variant for a function that carries a LinearAttention and updates its state in place.

    None for anything else.
    """
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem, gpu = LinearAttention.from_json(str(func.attrs[ATTRIBUTE])), device(target)
    if problem.head_dim > _LARGEST_HEAD or len(func.params) != len(problem.inputs()) + 1:
        return None
    tiles = {"linear": LinearTiles.default(problem, gpu)}
    return [Variant("columns", problem, gpu, tiles, lambda tiles: _kernel(problem, tiles["linear"]))]


def _kernel(problem: LinearAttention, tiles: LinearTiles) -> tirx.PrimFunc:
    """Return the PrimFunc (*inputs, y), with the state in place."""
    with IRBuilder() as builder, T.prim_func(private=True):
        bound = BoundLinearAttention(problem)
        columns = tiles.warps * (WARP // _LANES)
        shares = -(-problem.v_head_dim // columns)
        count = T.int64(problem.v_heads * shares) * bound.B
        with (
            T.launch_thread("blockIdx.x", tirx.max(count, T.int64(1))) as block,
            T.launch_thread("threadIdx.x", tiles.warps * WARP) as thread,
        ):
            index = let(block.astype("int64"))
            with T.If(index < count), T.Then():
                head = let(tirx.truncdiv(index, T.int64(shares)))
                b, h = (f(head, T.int64(problem.v_heads)) for f in (tirx.truncdiv, tirx.truncmod))
                c = tirx.truncmod(index, T.int64(shares)) * columns + (thread // _LANES).astype("int64")
                sequence = bound.sequence(let(b), let)
                with T.If(sequence.count > 0), T.Then():
                    _Column(bound, sequence, let(h), let(c), let((thread % _LANES).astype("int64"))).emit()
    return builder.get()


class _Column:
    """The code of a lane for its share of column c of a sequence's state of head h; the column may not exist."""

    def __init__(self, bound: BoundLinearAttention, sequence: LinearSequence, h: Expr, c: Expr, lane: Expr) -> None:
        self.bound, self.p, self.sequence, self.h, self.c, self.lane = bound, bound.linear, sequence, h, c, lane
        self.exists = let(c < self.p.v_head_dim)
        self.count = -(-self.p.head_dim // _LANES)
        self.S = alloc_registers(self.count, ACC)

    def emit(self) -> None:
        p, state = self.p, self.bound.state
        with unrolled(self.count) as m:
            d = self.row(m)
            store_element(self.S, m, self.load_or_zero(self.is_element(m), lambda: self.load_state(d)))
        with T.serial(self.sequence.count) as t:
            self.token(let(self.sequence.first + t))
        with unrolled(self.count) as m, T.If(self.is_element(m)), T.Then():
            T.buffer_store(state, cast(self.S[m], p.state_dtype), [self.sequence.state, self.h, self.row(m), self.c])

    def load_state(self, d: Expr) -> Expr:
        return self.bound.state_before(self.sequence, self.h, d, self.c)

    def row(self, m: Expr) -> Expr:
        return m.astype("int64") * _LANES + self.lane

    def is_element(self, m: Expr) -> Expr:
        is_full = self.p.head_dim % _LANES == 0
        return self.exists if is_full else tirx.all(self.exists, self.row(m) < self.p.head_dim)

    def load_or_zero(self, condition: Expr, value: Callable[[], Expr]) -> Expr:
        return T.if_then_else(condition, widen_to(value(), ACC), tirx.const(0.0, ACC))

    def element(self, name: str, t: Expr, at: Expr, condition: Expr) -> Expr:
        return self.load_or_zero(condition, lambda: self.bound.buffers[name][self.sequence.batch, t, at])

    def contract(self, name: str, t: Expr, at: Callable[[Expr], Expr]) -> Expr:
        """Return the dot product of the column with a row of a parameter, in every lane."""
        total = alloc_registers(1, ACC)
        store_element(total, 0, tirx.const(0.0, ACC))
        with unrolled(self.count) as m:
            x = self.element(name, t, at(self.row(m)), self.is_element(m))
            store_element(total, 0, total[0] + self.S[m] * x)
        for lanes in (4, 2, 1):
            store_element(total, 0, total[0] + shuffle_xor(total[0], lanes))
        return total[0]

    def token(self, t: Expr) -> None:
        p, bound, S, h = self.p, self.bound, self.S, self.h
        if p.decay == 1:
            a = let(tirx.exp(self.element("decay", t, bound.decay_at(h, T.int64(0)), self.exists)))
        if p.decay:
            with unrolled(self.count) as m:
                if p.decay > 1:
                    a = tirx.exp(self.element("decay", t, bound.decay_at(h, self.row(m)), self.is_element(m)))
                store_element(S, m, S[m] * a)
        u = alloc_registers(1, ACC)
        store_element(u, 0, self.element("v", t, bound.v_at(h, self.c), self.exists))
        if p.betas:
            recalled = self.contract("k", t, lambda d: bound.k_at(h, d))
            beta = self.element("beta", t, bound.beta_at(h), self.exists)
            store_element(u, 0, (u[0] - recalled) * beta)
        with unrolled(self.count) as m:
            store_element(S, m, S[m] + self.element("k", t, bound.k_at(h, self.row(m)), self.is_element(m)) * u[0])
        with T.serial(T.int64(p.group)) as g:
            y = self.contract("q", t, lambda d: bound.q_at(h, g, d))
            with T.If(tirx.all(self.exists, self.lane == 0)), T.Then():
                value = cast(y * tirx.const(p.scale, ACC), p.dtype)
                T.buffer_store(bound.buffers["y"], value, [self.sequence.batch, t, bound.y_at(h, g, self.c)])
