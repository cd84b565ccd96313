"""Interval analysis: which values an expression can take over a tile of indices, as code for the kernel.

A mask that is provably -inf on a tile of queries and keys lets a kernel skip the tile; one that is provably 0 lets it
run without mask code. What is provable is decided at run time: the ends of an interval are expressions, evaluated once
per tile, and a table is searched between the first and the last element that the tile can read.

Numbers have (lowest, highest), conditions have (surely, possibly): whether they hold everywhere, whether somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import ir, tirx
from tvm.ir import Expr, prim
from tvm.script.ir_builder import tirx as T

Interval = tuple[Expr, Expr]

Look = Callable[[tirx.Buffer, Interval], Interval]
"""The values of a table between two positions, both included."""


def interval(expr: Expr, bounds: Mapping[tirx.Var, Interval], look: Look) -> Interval | None:
    """The interval of `expr` for variables within `bounds`, both ends included; None where nothing is known.

    Emits code where the IRBuilder stands.
    """
    return _Analysis(bounds, look).of(expr)


class _Analysis:
    def __init__(self, bounds: Mapping[tirx.Var, Interval], look: Look) -> None:
        self.bounds, self.look = bounds, look

    def of(self, expr: Expr) -> Interval | None:
        result = self.combined(expr)
        if result is None:
            return (_FALSE, _TRUE) if str(expr.ty) == "bool" else None
        low = _named(result[0])
        return low, low if result[0] is result[1] else _named(result[1])

    def combined(self, expr: Expr) -> Interval | None:
        if isinstance(expr, tirx.Var):
            return self.bounds[expr]
        if isinstance(expr, prim.IntImm | prim.FloatImm):
            return expr, expr
        if isinstance(expr, ir.TensorLoad):
            place = self.of(expr.indices[0])
            return None if place is None else self.look(expr.source, place)
        if isinstance(expr, prim.And | prim.Or):
            (s, p), (t, q) = self.condition(expr.a), self.condition(expr.b)
            return type(expr)(s, t), type(expr)(p, q)
        if isinstance(expr, prim.Not):
            surely, possibly = self.condition(expr.a)
            return prim.Not(possibly), prim.Not(surely)
        if isinstance(expr, prim.Select):
            return self.chosen(expr)
        if isinstance(expr, prim.Cast):
            return self.cast(expr)
        if not isinstance(expr, prim.BinaryOpExpr | prim.CmpExpr):
            return None
        a, b = self.of(expr.a), self.of(expr.b)
        if a is None or b is None:
            return None
        rule = _RULES.get(type(expr))
        return None if rule is None else rule(a, b)

    def condition(self, expr: Expr) -> Interval:
        return self.of(expr) or (_FALSE, _TRUE)

    def chosen(self, expr: prim.Select) -> Interval | None:
        a, b = self.of(expr.true_value), self.of(expr.false_value)
        if a is None or b is None:
            return None
        surely, possibly = self.condition(expr.condition)
        either = (tirx.all, tirx.any) if str(expr.ty) == "bool" else (tirx.min, tirx.max)
        low, high = (prim.Select(surely, x, prim.Select(possibly, merge(x, y), y)) for merge, x, y in zip(either, a, b))
        return low, high

    def cast(self, expr: prim.Cast) -> Interval | None:
        value = self.of(expr.value)
        if value is None:
            return None
        if str(expr.ty) == "bool":
            zero = tirx.const(0, str(expr.value.ty))
            surely, never = tirx.any(value[0] > zero, value[1] < zero), tirx.all(*(end.equal(zero) for end in value))
            return surely, prim.Not(never)
        return value[0].astype(str(expr.ty)), value[1].astype(str(expr.ty))


_TRUE, _FALSE = tirx.const(True, "bool"), tirx.const(False, "bool")


def _product(a: Interval, b: Interval) -> Interval:
    ends = [x * y for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    low = high = ends[0]
    for end in ends[1:]:
        low, high = tirx.min(low, end), tirx.max(high, end)
    return low, high


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


def _unequal(a: Interval, b: Interval) -> Interval:
    surely, possibly = _equal(a, b)
    return prim.Not(possibly), prim.Not(surely)


_RULES: dict[type, Callable[[Interval, Interval], Interval | None]] = {
    prim.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    prim.Sub: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    prim.Mul: _product,
    prim.Min: lambda a, b: (tirx.min(a[0], b[0]), tirx.min(a[1], b[1])),
    prim.Max: lambda a, b: (tirx.max(a[0], b[0]), tirx.max(a[1], b[1])),
    prim.Div: lambda a, b: _quotient(a, b) if isinstance(b[0], prim.FloatImm) else None,
    prim.FloorDiv: _quotient,
    prim.FloorMod: _remainder,
    prim.LT: lambda a, b: (a[1] < b[0], a[0] < b[1]),
    prim.LE: lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    prim.GT: lambda a, b: (a[0] > b[1], a[1] > b[0]),
    prim.GE: lambda a, b: (a[0] >= b[1], a[1] >= b[0]),
    prim.EQ: _equal,
    prim.NE: _unequal,
}


def extremes(
    element: Callable[[Expr], Expr], size: Expr, places: Interval, scratch: Callable[[int, str], tirx.Buffer]
) -> Interval:
    """The values of a table of that size between two positions, by a loop. NaN makes the interval infinite.

    scratch gives memory for so many elements of a type.
    """
    first, end = (T.bind(tirx.max(tirx.min(place, size - 1), 0)) for place in places)
    dtype = str(element(first).ty)
    low, high, ordered = (scratch(1, kind) for kind in (dtype, dtype, "bool"))

    def put(buffer: tirx.Buffer, value: Expr) -> None:
        T.buffer_store(buffer, value, [0])

    put(low, element(first))
    put(high, element(first))
    put(ordered, _TRUE)
    is_float = dtype.startswith("float")
    with T.serial(end - first + 1) as k:
        x = T.bind(element(first + k))
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


def _named(value: Expr) -> Expr:
    return value if isinstance(value, tirx.Var | prim.IntImm | prim.FloatImm) else T.bind(value)
