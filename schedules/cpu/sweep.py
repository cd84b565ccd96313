"""Sweeps: loops over consecutive elements of a tensor, with a straight-line body that becomes vectors.

Trailing axes are taken together as long as addresses stay linear in their common index. An axis is cut where a
condition changes, as in a concatenation, so that no condition is left in the pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, children, is_int, substitute, walk
from lowering.tensorir.facts import Facts

from ..reading.stages import Axis, unravel, volume
from ..reading.values import Program
from .loop_body import Body, before_loop, is_vectorizable
from .loops import nest, vector_loop
from .vector import let

Write = Callable[[list[Expr], Facts], Program]
"""The program at a point, with what is known about the free variables in it."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Elements low <= index < high, computed by one program."""

    low: Expr
    high: Expr
    index: tirx.Var
    program: Program


@dataclass(frozen=True, eq=False)
class Sweep:
    """A rectangle of elements: `outer` axes, then `extent` elements that are swept over in pieces."""

    outer: tuple[Axis, ...]
    extent: Expr
    pieces: list[Piece]

    @property
    def work(self) -> int:
        """Simple operations per element, roughly."""
        return max(1 + len(piece.program.bindings) // 2 for piece in self.pieces)

    def emit(
        self,
        outer: Mapping[tirx.Var, Expr],
        lanes: int,
        body: Callable[[list[Expr]], None],
        window: tuple[Expr, Expr] | None = None,
    ) -> None:
        """body(results of the program) for each element swept over at one point of the outer axes.

        window: only the elements low <= index < high.
        """
        for piece in self.pieces:
            low, high = piece.low, piece.high
            if window is not None:
                low, high = (let(x) for x in (tirx.max(low, window[0]), tirx.min(high, window[1])))
                high = low + let(tirx.max(high - low, 0))

            inside = before_loop(piece.program, piece.index, outer)

            def element(width: int, low: Expr = low, inside: Body = inside) -> Callable[[Expr, Expr], None]:
                write = inside(width)
                return lambda i, lane: body(write(low + i, lane))

            vector_loop(
                high - low,
                lanes if is_vectorizable(piece.program, piece.index) else 1,
                element,
            )

    def emit_all(self, lanes: int, body: Callable[[list[Expr]], None]) -> None:
        """The sweep at each point of the outer axes, in loops where the IRBuilder stands."""

        nest(self.outer, lambda point: self.emit(point, lanes, body))


def plan_sweep(axes: Sequence[Axis], write: Write, facts: Facts) -> Sweep:
    """The best sweep over a rectangle, whose last axes become its range. Axes of one element are left out."""
    several = tuple(axis for axis in axes if not is_int(axis.extent, 1))
    index = tirx.Var("i", "int64")
    for count in range(len(several), 0, -1) or (0,):
        outer, together = (
            several[: len(several) - count],
            several[len(several) - count :],
        )
        extent = volume(together)
        values = dict(zip((axis.var for axis in together), unravel(index, together)))
        zero = tirx.const(0, "int64")
        point = [values.get(a.var, a.var if a in outer else zero) for a in axes]

        def piece(low: Expr, high: Expr, outer: tuple = outer, point: list = point) -> Piece:
            more = facts.copy()
            for axis in outer:
                more.bind(axis.var, 0, axis.extent)
            more.bind(index, low, high)
            return Piece(low, high, index, write(point, more))

        whole = piece(zero, extent)
        if count <= 1 or _is_linear(whole.program, index):
            break
    if is_vectorizable(whole.program, index):
        return Sweep(outer, extent, [whole])
    cuts = [
        zero,
        *(tirx.min(cut, extent) for cut in _cuts(whole.program, index, extent)),
        extent,
    ]
    return Sweep(outer, extent, [piece(low, high) for low, high in itertools.pairwise(cuts)])


def _is_linear(program: Program, index: tirx.Var) -> bool:
    """Whether positions and values use the index without quotients and remainders."""
    for expr in program.expressions:
        for node in walk(expr):
            if isinstance(node, prim.FloorDiv | prim.FloorMod | prim.Div | prim.Mod) and _uses(node, index):
                return False
    return True


def _uses(expr: Expr, index: tirx.Var) -> bool:
    """Whether the index occurs in the expression itself; elements that it loads do not count."""
    if isinstance(expr, ir.TensorLoad):
        return False
    return expr.same_as(index) or any(_uses(operand, index) for operand in children(expr))


def _cuts(program: Program, index: tirx.Var, extent: Expr) -> list[int]:
    """Where inside the range comparisons of the index with numbers change."""
    analyzer = Analyzer()
    cuts: set[int] = set()
    for expr in program.expressions:
        for node in walk(expr):
            if not isinstance(node, prim.LT | prim.LE | prim.GT | prim.GE) or node.a.ty != "int64":
                continue
            distance = analyzer.simplify(node.a - node.b)
            start = analyzer.simplify(substitute(distance, {index: tirx.const(0, "int64")}))
            slope = analyzer.simplify(substitute(distance, {index: index + 1}) - distance)
            if not isinstance(start, prim.IntImm) or not isinstance(slope, prim.IntImm) or abs(slope.value) != 1:
                continue
            zero = -start.value * slope.value  # the comparison changes next to the root of the distance
            after = isinstance(node, prim.LE | prim.GT) == (slope.value == 1)
            cuts.add(zero + after)
    length = extent.value if isinstance(extent, prim.IntImm) else None
    return sorted(cut for cut in cuts if cut > 0 and (length is None or cut < length))
