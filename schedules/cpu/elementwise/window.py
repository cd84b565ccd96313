"""Windows that slide over channels-last data: their elements, and the conditions for these to lie in the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, is_int, loads, rewrite, substitute, uses, walk

from ...reading.reducers import Combine, read_term
from ...reading.stages import Axis, Stage, has_same_axes
from .elementwise import find_expensive_outputs

_MAX_ELEMENTS = 1024  # of a window; larger ones are reductions
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")


@dataclass(frozen=True)
class BoundsGuard:
    """The condition for an element of a window to lie in the data, for one axis and one k.

    It reads slope * position + step * k + rest >= 0, with the position along the axis.
    """

    axis: Axis
    k: Axis
    slope: int
    step: int
    rest: Expr

    def range_of_positions(self) -> tuple[Expr | None, Expr | None]:
        """Return the positions [low, high) whose windows lie in the data entirely; None means unbounded."""
        worst = self.rest + min(self.step * (self.k.extent.value - 1), 0)
        if self.slope > 0:
            return _ceil_div(-worst, self.slope), None
        return None, worst // -self.slope + 1

    def range_of_k(self, position: Expr) -> tuple[Expr | None, Expr | None]:
        """Return the elements [low, high) that lie in the data at a position."""
        start = self.rest + position * self.slope
        return (_ceil_div(-start, self.step), None) if self.step > 0 else (None, start // -self.step + 1)


@dataclass(frozen=True)
class WindowReduction:
    """A stage over windows: axes are [N, ..., positions, channels], `combine` of `term` over the elements.

    The term does not contain the guards' comparisons.
    """

    stage: Stage
    combine: Combine
    term: Expr
    guards: tuple[BoundsGuard, ...]
    outputs: tuple[tirx.Buffer, ...]

    @property
    def positions(self) -> Axis:
        return self.stage.axes[-2]

    @property
    def interior_positions(self) -> int | None:
        """The number of positions whose windows lie in the data entirely along the row; None if it is dynamic."""
        low: Expr = tirx.const(0, "int64")
        high = self.positions.extent
        for guard in (guard for guard in self.guards if guard.axis is self.positions):
            above, below = guard.range_of_positions()
            low, high = low if above is None else tirx.max(low, above), high if below is None else tirx.min(high, below)
        count = Analyzer().simplify(high - low)
        return max(count.value, 0) if isinstance(count, tirx.IntImm) else None

    @property
    def channels(self) -> Axis:
        return self.stage.axes[-1]


def read_windows(stages: list[Stage], parameters: set[tirx.Buffer]) -> WindowReduction | None:
    """Return the only reduction if it is over windows and all other stages are element-wise ones that follow it."""
    reductions = [stage for stage in stages if stage.reduce]
    if len(reductions) != 1 or len(reductions[0].axes) < 3:
        return None
    (stage,) = reductions
    reduced = read_term(stage)
    if reduced is None or not all(isinstance(axis.extent, tirx.IntImm) for axis in stage.reduce):
        return None
    combine, term = reduced
    channel, ks = stage.axes[-1], {axis.var for axis in stage.reduce}
    if is_int(channel.extent, 1) or math.prod(axis.extent.value for axis in stage.reduce) > _MAX_ELEMENTS:
        return None
    slides = False
    for load in loads(term):
        if not load.indices:
            return None
        *before, last = load.indices
        if load.source not in parameters or any(uses(index, {channel.var}) for index in before):
            return None
        if not last.same_as(channel.var) and uses(last, {channel.var, *ks}):
            return None
        slides |= any(uses(index, {axis.var for axis in stage.axes}) and uses(index, ks) for index in before)
    guards = _read_guards(stage, term)
    if not slides or guards is None:
        return None
    read_guards, inside = guards
    derived, outputs = {stage.output}, [stage.output] if stage.output in parameters else []
    for other in stages:
        if other is stage:
            continue
        reads = [load for load in loads(other.value) if load.source in derived]
        if not all(all(map(prim.expr_deep_equal, load.indices, other.indices)) for load in reads):
            return None
        if reads:
            derived.add(other.output)
        if (reads or other.output in parameters) and not has_same_axes(other, stage):
            return None
        outputs += [other.output] if other.output in parameters else []
    if not outputs or find_expensive_outputs([s for s in stages if s.output in {load.source for load in loads(term)}]):
        return None
    return WindowReduction(stage, combine, inside, tuple(read_guards), tuple(outputs))


def _read_guards(stage: Stage, term: Expr) -> tuple[list[BoundsGuard], Expr] | None:
    """Return the guards, and the term without them; None if a failing guard does not make the term the identity."""
    spatial = {axis.var for axis in stage.axes}
    comparisons = [
        node
        for node in walk(term)
        if isinstance(node, prim.LT | prim.LE | prim.GT | prim.GE) and node.a.ty == "int64" and uses(node, spatial)
    ]
    guards = []
    for node in comparisons:
        guard = _read_guard(stage, node)
        if guard is None:
            return None
        guards.append(guard)

    def where(failing: Expr | None) -> Expr:
        """Return the term where all comparisons but one are true."""

        def replace(node: Expr) -> Expr | None:
            is_guard = any(node.same_as(comparison) for comparison in comparisons)
            return tirx.const(failing is None or not node.same_as(failing), "bool") if is_guard else None

        return _fold_conditions(rewrite(term, replace))

    if not all(_is_identity(where(comparison), stage) for comparison in comparisons):
        return None
    return guards, where(None)


def _fold_conditions(expr: Expr) -> Expr:
    """Simplify the expression by its constant conditions."""

    def choose(node: Expr) -> Expr | None:
        if isinstance(node, prim.Select):
            condition, yes, no = node.condition, node.true_value, node.false_value
        elif isinstance(node, ir.Call) and node.op.same_as(_IF_THEN_ELSE):
            condition, yes, no = node.args
        else:
            return None
        condition = Analyzer().simplify(condition)
        return _fold_conditions(yes if condition.value else no) if isinstance(condition, tirx.IntImm) else None

    return rewrite(expr, choose)


def _is_identity(term: Expr, stage: Stage) -> bool:
    """Return whether a term with constant conditions changes nothing.

    It does if it is the initial value of the reduction, or 0 times a factor, where the reduction adds.
    """
    initial = stage.init
    while isinstance(term, prim.Cast):
        term = term.value
    if isinstance(term, prim.Mul) and isinstance(stage.value, prim.Add):
        return _is_identity(term.a, stage) or _is_identity(term.b, stage)
    while isinstance(initial, prim.Cast):
        initial = initial.value
    constants = (prim.FloatImm, prim.IntImm)
    return isinstance(term, constants) and isinstance(initial, constants) and term.value == initial.value


def _read_guard(stage: Stage, node: Expr) -> BoundsGuard | None:
    simplify = Analyzer().simplify
    inside = {
        prim.GE: lambda a, b: a - b,
        prim.GT: lambda a, b: a - b - 1,
        prim.LE: lambda a, b: b - a,
        prim.LT: lambda a, b: b - a - 1,
    }[type(node)](node.a, node.b)
    axes = [axis for axis in stage.axes if uses(inside, {axis.var})]
    ks = [axis for axis in stage.reduce if uses(inside, {axis.var})]
    if len(axes) != 1 or len(ks) != 1:
        return None
    (axis,), (k,) = axes, ks
    slope, step = (simplify(substitute(inside, {a.var: a.var + 1}) - inside) for a in (axis, k))
    zero = tirx.const(0, "int64")
    rest = simplify(substitute(inside, {axis.var: zero, k.var: zero}))
    if not isinstance(slope, tirx.IntImm) or not isinstance(step, tirx.IntImm) or not slope.value or not step.value:
        return None
    return BoundsGuard(axis, k, slope.value, step.value, rest)


def _ceil_div(a: Expr, b: int) -> Expr:
    return (a + (b - 1)) // b
