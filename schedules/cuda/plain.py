"""Attention for every problem: the plain lowering, a warp for each query row. What no faster kernel serves, this does.

A lane keeps every 32nd element of q and o in registers, so that a warp reads a row of K or V in one go; a dot product
is added up by shuffles, after which every lane knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from lowering.attention.bound import Bound
from lowering.attention.plain import Row

from .ptx import WARP, fixed, put, reduce_warp

WARPS = 4  # per thread block


def plain(bound: Bound) -> None:
    """Emits the kernel, with its launch, into the PrimFunc that `bound` has opened. Any problem."""
    heads = bound.problem.q_heads
    rows = T.int64(1) * bound.B * heads * bound.S
    with (
        T.launch_thread("blockIdx.x", tirx.max(tirx.ceildiv(rows, WARPS), T.int64(1))) as block,
        T.launch_thread("threadIdx.x", WARPS * WARP) as thread,
    ):
        row = fixed(block.astype("int64") * WARPS + thread // WARP)
        with T.If(row < rows), T.Then():
            head, i = fixed(tirx.truncdiv(row, bound.S)), fixed(tirx.truncmod(row, bound.S))
            b, h = fixed(tirx.truncdiv(head, heads)), fixed(tirx.truncmod(head, heads))
            WarpRow(bound, b, h, i, fixed(thread % WARP)).emit()


class WarpRow(Row):
    """The code for query row i of head h in batch b, run by the 32 lanes of a warp."""

    def __init__(self, bound: Bound, b: Expr, h: Expr, i: Expr, lane: Expr) -> None:
        self.lane = lane
        super().__init__(bound, b, h, i)
        self.lo, self.hi = fixed(self.lo), fixed(self.hi)

    def vector(self, dim: int) -> tirx.Buffer:
        return self.bound.scratch(-(-dim // WARP), self.problem.acc_dtype)

    @contextmanager
    def elements(self, dim: int) -> Iterator[tuple[Expr, Expr]]:
        with ExitStack() as inside:
            place = inside.enter_context(T.unroll(-(-dim // WARP)))
            d = T.bind(place * WARP + self.lane)
            if dim % WARP:
                inside.enter_context(T.If(d < dim))
                inside.enter_context(T.Then())
            yield place, d

    def alone(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(T.If(self.lane == 0))
        stack.enter_context(T.Then())
        return stack

    def put_qk(self, j: Expr, value: Expr) -> None:
        super().put_qk(j, fixed(value))  # an infinite constant of 16 bits is no C++ in TVM 0.27

    def logit(self, j: Expr) -> Expr:
        return T.bind(fixed(super().logit(j)))

    def dot(self, j: Expr) -> Expr:
        total = self.bound.scratch(1, self.problem.acc_dtype)
        put(total, 0, self.zero)
        with self.elements(self.problem.head_dim) as (place, d):
            product = self.q[place] * self.bound.k(self.b, self.hk, j, d)
            put(total, 0, total[0] + product)
        return T.bind(reduce_warp(total[0], lambda x, y: x + y))
