"""Reading windows that slide over channels-last data: which elements they have, and which of them are in the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim
from tvm.sym import Analyzer

from lowering.tensorir.expressions import Expr, is_int, loads, rewrite, substitute, uses, walk

from ..reading.reducers import Combine, read_term
from ..reading.stages import Axis, Stage, same_axes
from .elementwise import expensive_outputs

_MOST_ELEMENTS = 1024  # of a window; larger ones are reductions
_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")


@dataclass(frozen=True)
class Guard:
    """Where an element of a window is in the data: slope * place + step * k + rest >= 0, of one axis and one k."""

    axis: Axis
    k: Axis
    slope: int
    step: int
    rest: Expr

    def range_of_places(self) -> tuple[Expr | None, Expr | None]:
        """Places [low, high) whose windows are inside with all of their elements; None for no bound."""
        worst = self.rest + min(self.step * (self.k.extent.value - 1), 0)
        if self.slope > 0:
            return _ceil_div(-worst, self.slope), None
        return None, worst // -self.slope + 1

    def range_of_k(self, place: Expr) -> tuple[Expr | None, Expr | None]:
        """Elements [low, high) that are inside at a place."""
        at = self.rest + place * self.slope
        return (_ceil_div(-at, self.step), None) if self.step > 0 else (None, at // -self.step + 1)


@dataclass(frozen=True)
class Windows:
    """A stage over windows: axes are [N, ..., places, channels], `combine` of `term` over the elements.

    The guards' comparisons are no part of the term.
    """

    stage: Stage
    combine: Combine
    term: Expr
    guards: tuple[Guard, ...]
    outputs: tuple[tirx.Buffer, ...]

    @property
    def places(self) -> Axis:
        return self.stage.axes[-2]

    @property
    def whole_places(self) -> int | None:
        """How many have all elements of their windows along the row; None where only a run tells."""
        low: Expr = tirx.const(0, "int64")
        high = self.places.extent
        for guard in (guard for guard in self.guards if guard.axis is self.places):
            above, below = guard.range_of_places()
            low, high = low if above is None else tirx.max(low, above), high if below is None else tirx.min(high, below)
        count = Analyzer().simplify(high - low)
        return max(count.value, 0) if isinstance(count, tirx.IntImm) else None

    @property
    def channels(self) -> Axis:
        return self.stage.axes[-1]


def read_windows(stages: list[Stage], parameters: set[tirx.Buffer]) -> Windows | None:
    """The one reduction among the stages, if it is over windows and all others are element by element behind it."""
    reductions = [stage for stage in stages if stage.reduce]
    if len(reductions) != 1 or len(reductions[0].axes) < 3:
        return None
    (stage,) = reductions
    reduced = read_term(stage)
    if reduced is None or not all(isinstance(axis.extent, tirx.IntImm) for axis in stage.reduce):
        return None
    combine, term = reduced
    channel, ks = stage.axes[-1], {axis.var for axis in stage.reduce}
    if is_int(channel.extent, 1) or math.prod(axis.extent.value for axis in stage.reduce) > _MOST_ELEMENTS:
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
    found, inside = guards
    made, outputs = {stage.output}, [stage.output] if stage.output in parameters else []
    for other in stages:
        if other is stage:
            continue
        own = [load for load in loads(other.value) if load.source in made]
        if not all(all(map(prim.expr_deep_equal, load.indices, other.indices)) for load in own):
            return None
        if own:
            made.add(other.output)
        if (own or other.output in parameters) and not same_axes(other, stage):
            return None
        outputs += [other.output] if other.output in parameters else []
    if not outputs or expensive_outputs([s for s in stages if s.output in {load.source for load in loads(term)}]):
        return None
    return Windows(stage, combine, inside, tuple(found), tuple(outputs))


def _read_guards(stage: Stage, term: Expr) -> tuple[list[Guard], Expr] | None:
    """The guards, and the term without them; None where it is not the identity wherever one of them fails."""
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
        """The term where all comparisons hold but one."""

        def truth(node: Expr) -> Expr | None:
            known = any(node.same_as(comparison) for comparison in comparisons)
            return tirx.const(failing is None or not node.same_as(failing), "bool") if known else None

        return _chosen(rewrite(term, truth))

    if not all(_is_identity(where(comparison), stage) for comparison in comparisons):
        return None
    return guards, where(None)


def _chosen(expr: Expr) -> Expr:
    """The expression without conditions that are known."""

    def choose(node: Expr) -> Expr | None:
        if isinstance(node, prim.Select):
            condition, yes, no = node.condition, node.true_value, node.false_value
        elif isinstance(node, ir.Call) and node.op.same_as(_IF_THEN_ELSE):
            condition, yes, no = node.args
        else:
            return None
        condition = Analyzer().simplify(condition)
        return _chosen(yes if condition.value else no) if isinstance(condition, tirx.IntImm) else None

    return rewrite(expr, choose)


def _is_identity(term: Expr, stage: Stage) -> bool:
    """Whether a term whose conditions are known changes nothing: it is what the reduction begins with, or 0 times
    something, which is added."""
    initial = stage.init
    while isinstance(term, prim.Cast):
        term = term.value
    if isinstance(term, prim.Mul) and isinstance(stage.value, prim.Add):
        return _is_identity(term.a, stage) or _is_identity(term.b, stage)
    while isinstance(initial, prim.Cast):
        initial = initial.value
    known = (prim.FloatImm, prim.IntImm)
    return isinstance(term, known) and isinstance(initial, known) and term.value == initial.value


def _read_guard(stage: Stage, node: Expr) -> Guard | None:
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
    return Guard(axis, k, slope.value, step.value, rest)


def _ceil_div(a: Expr, b: int) -> Expr:
    return (a + (b - 1)) // b
