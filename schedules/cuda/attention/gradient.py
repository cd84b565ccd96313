"""Gradients of attention on GPUs: a warp for each query row computes dQ, a warp for each key dK and dV.

A lane has every 32nd element of vectors, so that a warp reads a row in one access; dot products are reduced by
shuffles. Scores are computed once for the rows and once for the keys. Warps share only the gradients of tables, to
which rows add by atomic operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from lowering.attention.codegen.plain_gradient import GradientCode, HeadPosition
from lowering.attention.record.gradient import ATTRIBUTE, BoundGradient, GradientParameters, GradientProblem, TableRead

from ...tiles import Space, Tiles
from ...variant import Variant
from ..primitives.device import Device, device
from ..primitives.lanes import lane_elements, per_lane
from ..primitives.ptx import WARP, let, shuffle_xor
from ..primitives.threads import ThreadTiles, launch_threads, launch_warps


@dataclass(frozen=True)
class GradientTiles(Tiles):
    """Tiles of `gradient`."""

    block: int = 4
    """Warps per block."""

    @classmethod
    def space(cls, problem: GradientProblem, device: Device) -> Space:
        return {"block": (1, 2, 4, 8)}

    def rules(self, problem: GradientProblem, device: Device) -> dict[str, bool]:
        return {f"block = {self.block} must be 1 to 32": self.block in range(1, 33)}


def gradient(func: tirx.PrimFunc, target: tvm.target.Target) -> list[Variant] | None:
    """Return the variant for a function that carries a GradientProblem; None for anything else."""
    if func.attrs is None or ATTRIBUTE not in func.attrs:
        return None
    problem, gpu = GradientProblem.from_json(func.attrs[ATTRIBUTE]), device(target)
    tiles = {"gradient": GradientTiles.default(problem, gpu)}
    return [Variant("warps", problem, gpu, tiles, lambda tiles: _kernel(problem, tiles["gradient"]))]


def _kernel(problem: GradientProblem, tiles: GradientTiles) -> tirx.PrimFunc:
    """Return the PrimFunc with the parameters of the plain gradient."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("attention_gradient")
        bound = BoundGradient(GradientParameters(problem, scope="local"))
        p, B = bound.problem, T.int64(1) * bound.bound.B
        for name in problem.tables:
            _clear(bound.buffers[f"d_{name}"], tiles.block * WARP)

        def row(lane: Expr, position: HeadPosition) -> None:
            warp = WarpGradient(bound, lane)
            warp.row(position)
            if problem.tables:
                warp.tables(position)

        _launch(B, p.q_heads, bound.bound.S, tiles.block, row)
        _launch(
            B, p.kv_heads, bound.bound.T, tiles.block, lambda lane, position: WarpGradient(bound, lane).key(position)
        )
    return builder.get()


def _launch(batches: Expr, heads: int, length: Expr, block: int, emit: Callable[[Expr, HeadPosition], None]) -> None:
    """Launch a warp for each batch, head and row or key."""
    with launch_warps(batches * heads * length, block) as (n, thread):
        head, at = let(tirx.truncdiv(n, length)), let(tirx.truncmod(n, length))
        emit(let(thread % WARP), (let(tirx.truncdiv(head, heads)), let(tirx.truncmod(head, heads)), at))


def _clear(buffer: tirx.Buffer, threads: int) -> None:
    size = T.int64(1)
    for extent in buffer.shape:
        size = size * extent
    with launch_threads(size, ThreadTiles(threads)) as n:
        T.buffer_store(buffer, tirx.const(0.0, buffer.dtype), [T.int64(0)] * (len(buffer.shape) - 1) + [n])


class WarpGradient(GradientCode):
    """The code for a row or a key, run by the 32 lanes of a warp."""

    def __init__(self, bound: BoundGradient, lane: Expr) -> None:
        super().__init__(bound)
        self.lane = lane

    def vector(self, size: int) -> tirx.Buffer:
        return self.bound.bound.scratch(per_lane(size), self.acc)

    @contextmanager
    def elements(self, size: int) -> Iterator[tuple[Expr, Expr]]:
        with lane_elements(size, self.lane) as element:
            yield element

    def total(self, value: Expr) -> Expr:
        total = let(value)
        for lanes in (16, 8, 4, 2, 1):
            total = let(total + shuffle_xor(total, lanes))
        return total

    def add_to_table(self, read: TableRead, pair: tuple[Expr, Expr, Expr, Expr], s: Expr, value: Expr) -> None:
        buffer = self.buffers[f"d_{read.table}"]
        with T.If(self.lane == 0), T.Then():
            index = [T.bind(at(*pair, s)) for at in read.at]
            address = T.address_of(buffer[tuple(index)])
            T.evaluate(tirx.call_extern(self.acc, "atomicAdd", address, value))
