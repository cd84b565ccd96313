"""Interval analysis: which values an expression can take over a tile of indices, as code for the kernel.

A mask that is provably -inf on a tile of queries and keys lets a kernel skip the tile; one that is provably 0 lets it
run without mask code. What is provable is decided at run time: the ends of an interval are expressions, evaluated once
per tile, and a table is searched between the first and the last element that the tile can read.

Numbers have (lowest, highest), conditions have (surely, possibly): whether they hold everywhere, whether somewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .emit import Keep, cast, scalar_type
from .node import Expr, terms

Interval = tuple[ir.Expr, ir.Expr]

Look = Callable[[str, Sequence[Interval]], Interval]
"""The values of a table between two positions on each axis, both included."""


def interval(
    expr: Expr, bounds: Mapping[str, Interval], scalars: Mapping[str, ir.Expr], look: Look, keep: Keep
) -> Interval | None:
    """The interval of `expr` for indices within `bounds`, both ends included; None where nothing is known.

    Emits code where the IRBuilder stands.
    """
    return _Analysis(bounds, scalars, look, keep).of(expr)


class _Analysis:
    def __init__(self, bounds: Mapping[str, Interval], scalars: Mapping[str, ir.Expr], look: Look, keep: Keep) -> None:
        self.bounds, self.scalars, self.look, self.keep = bounds, scalars, look, keep
        self.found: dict[Expr, Interval | None] = {}

    def of(self, expr: Expr) -> Interval | None:
        if expr not in self.found:
            self.found[expr] = self.computed(expr)
        return self.found[expr]

    def computed(self, expr: Expr) -> Interval | None:
        result = self.combined(expr)
        if result is None:
            return (_FALSE, _TRUE) if expr.dtype == "bool" else None
        low = self.named(result[0])
        return low, low if result[0] is result[1] else self.named(result[1])

    def combined(self, expr: Expr) -> Interval | None:
        if expr.op == "number":
            value = tirx.const(expr.number, expr.dtype)
            return value, value
        if expr.op == "scalar":
            value = _typed(self.scalars[expr.name], expr.dtype)
            return value, value
        if expr.op == "index":
            low, high = self.bounds[expr.name]
            return _typed(low, expr.dtype), _typed(high, expr.dtype)
        if expr.op == "select":
            return self.chosen(expr)
        if expr.op in ("and", "or", "not"):
            return _CONDITIONS[expr.op](*map(self.condition, expr.args))
        if expr.op == "sum":
            return self.total(expr)
        args = [self.of(arg) for arg in expr.args]
        known = [arg for arg in args if arg is not None]
        if len(known) < len(args):
            return None
        if expr.op == "load":
            return self.look(expr.name, known)
        if expr.op == "cast":
            return _cast(known[0], expr.args[0].dtype, expr.dtype)
        rule = _RULES.get(expr.op)
        found = None if rule is None else rule(*known)
        if expr.op == "mul" and found is not None and _may_wrap(expr):
            a, b = ([_typed(end, "float64") for end in dict.fromkeys(ends)] for ends in known)
            return self.unless_it_wraps(found, _outermost(x * y for x in a for y in b), expr)
        return found

    def named(self, value: ir.Expr) -> ir.Expr:
        return value if isinstance(value, tirx.Var | prim.IntImm | prim.FloatImm) else T.bind(self.keep(value))

    def condition(self, expr: Expr) -> Interval:
        return self.of(expr) or (_FALSE, _TRUE)

    def total(self, expr: Expr) -> Interval | None:
        parts: list[tuple[int, Interval]] = []
        for factor, term in terms(expr):
            found = self.of(term)
            if found is None:
                return None
            parts.append((factor, found if factor > 0 else found[::-1]))

        def end(at: int, dtype: str) -> ir.Expr:
            scaled = (_typed(found[at], dtype) * tirx.const(factor, dtype) for factor, found in parts)
            return functools.reduce(lambda a, b: a + b, scaled)

        exact = end(0, expr.dtype), end(1, expr.dtype)
        return self.unless_it_wraps(exact, (end(0, "float64"), end(1, "float64")), expr) if _may_wrap(expr) else exact

    def unless_it_wraps(self, exact: Interval, rounded: Interval, expr: Expr) -> Interval:
        """The ends, or all numbers of the type where one is outside: such an element may be any, others are what they
        are. rounded are the ends in float64."""
        least, most = tirx.min_value(expr.dtype), tirx.max_value(expr.dtype)
        outside = self.named(tirx.any(rounded[0] < -float(most.value) - 1, rounded[1] >= float(most.value) + 1))
        return prim.Select(outside, least, exact[0]), prim.Select(outside, most, exact[1])

    def chosen(self, expr: Expr) -> Interval | None:
        condition, yes, no = expr.args
        a, b = self.of(yes), self.of(no)
        if a is None or b is None:
            return None
        surely, possibly = self.condition(condition)
        either = (tirx.all, tirx.any) if expr.dtype == "bool" else (tirx.min, tirx.max)
        low, high = (prim.Select(surely, x, prim.Select(possibly, merge(x, y), y)) for merge, x, y in zip(either, a, b))
        return low, high


_TRUE, _FALSE = tirx.const(True, "bool"), tirx.const(False, "bool")


def _typed(value: ir.Expr, dtype: str) -> ir.Expr:
    return value if scalar_type(value) == dtype else cast(value, dtype)


def _cast(value: Interval, source: str, dtype: str) -> Interval:
    """Of numbers that an integer type does not hold nobody knows what they become."""
    low, high = value
    if dtype != "bool":
        ends = low.astype(dtype), high.astype(dtype)
        if source == "bool" or "float" in dtype or ("float" not in source and np.can_cast(source, dtype)):
            return ends
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        below = high < tirx.const(float(most), source) if "float" in source else high <= tirx.const(most, source)
        fits = tirx.all(low >= tirx.const(least, source), below)
        return prim.Select(fits, ends[0], tirx.const(least, dtype)), prim.Select(fits, ends[1], tirx.const(most, dtype))
    zero = tirx.const(0, source)
    surely, never = tirx.any(value[0] > zero, value[1] < zero), tirx.all(*(end.equal(zero) for end in value))
    return surely, prim.Not(never)


def _sum(a: Interval, b: Interval) -> Interval:
    return _unless_nan(a[0] + b[0], "-inf"), _unless_nan(a[1] + b[1], "inf")


def _difference(a: Interval, b: Interval) -> Interval:
    return _unless_nan(a[0] - b[1], "-inf"), _unless_nan(a[1] - b[0], "inf")


def _multiply(a: Interval, b: Interval) -> Interval:
    ends = [x * y for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    low, _ = _outermost(_unless_nan(end, "-inf") for end in ends)
    _, high = _outermost(_unless_nan(end, "inf") for end in ends)
    return low, high


def _outermost(ends: Iterable[ir.Expr]) -> Interval:
    ends = list(ends)
    return functools.reduce(tirx.min, ends), functools.reduce(tirx.max, ends)


def _unless_nan(end: ir.Expr, instead: str) -> ir.Expr:
    """The end, or that: of infinite numbers it may be infinity less infinity, or 0 times that."""
    dtype = scalar_type(end)
    return prim.Select(tirx.isnan(end), tirx.const(float(instead), dtype), end) if "float" in dtype else end


def _may_wrap(expr: Expr) -> bool:
    """Whether it is one of integers that tables hold, of which some may be the largest that there are."""
    return "int" in expr.dtype and any(n.op == "load" and n.dtype.lstrip("u") == expr.dtype for n in expr.walk())


def _quotient(a: Interval, b: Interval) -> Interval | None:
    """By a positive number."""
    divisor = b[0]
    if not isinstance(divisor, prim.IntImm | prim.FloatImm) or divisor.value <= 0:
        return None
    if isinstance(divisor, prim.FloatImm):
        return a[0] / divisor, a[1] / divisor
    return tirx.floordiv(a[0], divisor), tirx.floordiv(a[1], divisor)


def _remainder(a: Interval, b: Interval) -> Interval | None:
    divisor = b[0]
    if not isinstance(divisor, prim.IntImm) or divisor.value <= 0:
        return None
    same = tirx.floordiv(a[0], divisor).equal(tirx.floordiv(a[1], divisor))
    low = prim.Select(same, tirx.floormod(a[0], divisor), tirx.const(0, str(divisor.ty)))
    return low, prim.Select(same, tirx.floormod(a[1], divisor), divisor - 1)


def _equal(a: Interval, b: Interval) -> Interval:
    surely = tirx.all(a[0].equal(a[1]), b[0].equal(b[1]), a[0].equal(b[0]))
    return surely, tirx.all(a[0] <= b[1], b[0] <= a[1])


def _not(a: Interval) -> Interval:
    surely, possibly = a
    return prim.Not(possibly), prim.Not(surely)


_CONDITIONS: dict[str, Callable[..., Interval]] = {
    "and": lambda a, b: (prim.And(a[0], b[0]), prim.And(a[1], b[1])),
    "or": lambda a, b: (prim.Or(a[0], b[0]), prim.Or(a[1], b[1])),
    "not": _not,
}

_RULES: dict[str, Callable[..., Interval | None]] = {
    "add": _sum,
    "sub": _difference,
    "mul": _multiply,
    "min": lambda a, b: (tirx.min(a[0], b[0]), tirx.min(a[1], b[1])),
    "max": lambda a, b: (tirx.max(a[0], b[0]), tirx.max(a[1], b[1])),
    "div": lambda a, b: _quotient(a, b) if isinstance(b[0], prim.FloatImm) else None,
    "floordiv": _quotient,
    "floormod": _remainder,
    "lt": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "le": lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
}


def extremes(
    element: Callable[..., ir.Expr],
    shape: Sequence[ir.Expr],
    places: Sequence[Interval],
    scratch: Callable[[int, str], tirx.Buffer],
) -> Interval:
    """The values of a table of that shape between two positions on each axis. NaN makes the interval infinite.

    scratch gives memory for so many elements of a type.
    """

    def put(buffer: tirx.Buffer, value: ir.Expr) -> None:
        T.buffer_store(buffer, value, [0])

    def inside(place: ir.Expr, size: ir.Expr) -> ir.Expr:
        """In memory: TVM would simplify what this is made of in every access."""
        kept = scratch(1, scalar_type(place))
        put(kept, tirx.max(tirx.min(place, size - 1), 0))
        return T.bind(kept[0])

    ends = [[inside(place, size) for place in pair] for size, pair in zip(shape, places, strict=True)]
    first = [start for start, _ in ends]
    dtype = str(element(*first).ty)
    low, high, ordered = (scratch(1, kind) for kind in (dtype, dtype, "bool"))

    put(low, element(*first))
    put(high, element(*first))
    put(ordered, _TRUE)
    is_float = dtype.startswith("float")
    with ExitStack() as loops:
        steps = [loops.enter_context(T.serial(end - start + 1)) for start, end in ends]
        x = T.bind(element(*(start + step for start, step in zip(first, steps))))
        if dtype == "bool":
            put(low, tirx.all(low[0], x))
            put(high, tirx.any(high[0], x))
        else:
            put(low, tirx.min(low[0], x))
            put(high, tirx.max(high[0], x))
        if is_float:
            put(ordered, tirx.all(ordered[0], x <= tirx.const(float("inf"), dtype)))
    if not is_float:
        return low[0], high[0]
    infinity = tirx.const(float("inf"), dtype)
    return prim.Select(ordered[0], low[0], -infinity), prim.Select(ordered[0], high[0], infinity)
