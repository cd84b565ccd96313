"""Sweeps: loops over consecutive elements of a tensor, with a straight-line body that is vectorized.

Trailing axes are fused as long as addresses stay linear in the fused index. An axis is split where a condition changes,
as in a concatenation, so that the segments contain no conditions.
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

from ...reading.stages import Axis, count_points, unravel
from ...reading.values import Program
from ..primitives.vector import let
from .loop_body import LoopBody, hoist_before_loop, is_vectorizable
from .loops import emit_nest, emit_vector_loop

Write = Callable[[list[Expr], Facts], Program]
"""The program at a point, given the facts about its free variables."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Elements low <= index < high, computed by one program."""

    low: Expr
    high: Expr
    index: tirx.Var
    program: Program


@dataclass(frozen=True, eq=False)
class Sweep:
    """A rectangle of elements: `outer` axes, then `extent` elements that are swept over in segments."""

    outer: tuple[Axis, ...]
    extent: Expr
    segments: list[Segment]

    @property
    def work(self) -> int:
        """The number of simple operations per element, roughly."""
        return max(1 + len(segment.program.bindings) // 2 for segment in self.segments)

    def emit(
        self,
        outer: Mapping[tirx.Var, Expr],
        lanes: int,
        body: Callable[[list[Expr]], None],
        window: tuple[Expr, Expr] | None = None,
    ) -> None:
        """Emit body(results of the program) for each element swept over at one point of the outer axes.

        window restricts the sweep to the elements low <= index < high.
        """
        for segment in self.segments:
            low, high = segment.low, segment.high
            if window is not None:
                low, high = (let(x) for x in (tirx.max(low, window[0]), tirx.min(high, window[1])))
                high = low + let(tirx.max(high - low, 0))

            inside = hoist_before_loop(segment.program, segment.index, outer)

            def element(width: int, low: Expr = low, inside: LoopBody = inside) -> Callable[[Expr, Expr], None]:
                write = inside(width)
                return lambda i, lane: body(write(low + i, lane))

            emit_vector_loop(
                high - low,
                lanes if is_vectorizable(segment.program, segment.index) else 1,
                element,
            )

    def emit_all(self, lanes: int, body: Callable[[list[Expr]], None]) -> None:
        """Emit the sweep at each point of the outer axes, in loops at the IRBuilder's insertion point."""

        emit_nest(self.outer, lambda point: self.emit(point, lanes, body))


def plan_sweep(axes: Sequence[Axis], write: Write, facts: Facts) -> Sweep:
    """Return the best sweep over a rectangle, whose last axes become its range. Axes of one element are dropped."""
    long_axes = tuple(axis for axis in axes if not is_int(axis.extent, 1))
    index = tirx.Var("i", "int64")
    for count in range(len(long_axes), 0, -1) or (0,):
        outer, fused = (
            long_axes[: len(long_axes) - count],
            long_axes[len(long_axes) - count :],
        )
        extent = count_points(fused)
        values = dict(zip((axis.var for axis in fused), unravel(index, fused)))
        zero = tirx.const(0, "int64")
        point = [values.get(a.var, a.var if a in outer else zero) for a in axes]

        def plan_segment(low: Expr, high: Expr, outer: tuple = outer, point: list = point) -> Segment:
            segment_facts = facts.copy()
            for axis in outer:
                segment_facts.bind(axis.var, 0, axis.extent)
            segment_facts.bind(index, low, high)
            return Segment(low, high, index, write(point, segment_facts))

        whole = plan_segment(zero, extent)
        if count <= 1 or _is_linear(whole.program, index):
            break
    if is_vectorizable(whole.program, index):
        return Sweep(outer, extent, [whole])
    bounds = [
        zero,
        *(tirx.min(bound, extent) for bound in _find_bounds(whole.program, index, extent)),
        extent,
    ]
    return Sweep(outer, extent, [plan_segment(low, high) for low, high in itertools.pairwise(bounds)])


def _is_linear(program: Program, index: tirx.Var) -> bool:
    """Return whether positions and values use the index without integer division."""
    for expr in program.expressions:
        for node in walk(expr):
            if isinstance(node, prim.FloorDiv | prim.FloorMod | prim.Div | prim.Mod) and _uses(node, index):
                return False
    return True


def _uses(expr: Expr, index: tirx.Var) -> bool:
    """Return whether the index occurs in the expression itself; elements that it loads do not count."""
    if isinstance(expr, ir.TensorLoad):
        return False
    return expr.same_as(index) or any(_uses(operand, index) for operand in children(expr))


def _find_bounds(program: Program, index: tirx.Var, extent: Expr) -> list[int]:
    """Return the points of the range at which comparisons of the index with numbers change."""
    analyzer = Analyzer()
    bounds: set[int] = set()
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
            bounds.add(zero + after)
    length = extent.value if isinstance(extent, prim.IntImm) else None
    return sorted(bound for bound in bounds if bound > 0 and (length is None or bound < length))
