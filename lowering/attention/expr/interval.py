"""Interval analysis: bounds of the values of an expression over a tile of indices, as code for the kernel.

A mask that is provably -inf on a tile of queries and keys lets a kernel skip the tile; one that is provably 0 lets it
run without mask code. Bounds are computed at run time: the ends of an interval are expressions, evaluated once per
tile, and a table is searched between the first and the last element that the tile can read.

Numbers have (lowest, highest). Conditions have (surely, possibly): whether they are true everywhere, and somewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from tvm import ir, tirx
from tvm.ir import prim
from tvm.script.ir_builder import tirx as T

from .emit import Materialize, cast, scalar_type
from .node import Expr, split_terms

Interval = tuple[ir.Expr, ir.Expr]

ReadTableRange = Callable[[str, Sequence[Interval]], Interval]
"""Returns the range of values of a table between two positions on each axis, both included."""


def compute_interval(
    expr: Expr,
    bounds: Mapping[str, Interval],
    scalars: Mapping[str, ir.Expr],
    read_range: ReadTableRange,
    materialize: Materialize,
) -> Interval | None:
    """Return the interval of `expr` for indices within `bounds`, both ends included; None if it is unknown.

    Emits code at the insertion point of the IRBuilder.
    """
    return _Analysis(bounds, scalars, read_range, materialize).analyze(expr)


class _Analysis:
    def __init__(
        self,
        bounds: Mapping[str, Interval],
        scalars: Mapping[str, ir.Expr],
        read_range: ReadTableRange,
        materialize: Materialize,
    ) -> None:
        self.bounds, self.scalars, self.read_range, self.materialize = bounds, scalars, read_range, materialize
        self.intervals: dict[Expr, Interval | None] = {}

    def analyze(self, expr: Expr) -> Interval | None:
        if expr not in self.intervals:
            self.intervals[expr] = self.compute(expr)
        return self.intervals[expr]

    def compute(self, expr: Expr) -> Interval | None:
        result = self.combine(expr)
        if result is None:
            return (_FALSE, _TRUE) if expr.dtype == "bool" else None
        low = self.bind(result[0])
        return low, low if result[0] is result[1] else self.bind(result[1])

    def combine(self, expr: Expr) -> Interval | None:
        if expr.op == "number":
            value = tirx.const(expr.number, expr.dtype)
            return value, value
        if expr.op == "scalar":
            value = _convert(self.scalars[expr.name], expr.dtype)
            return value, value
        if expr.op == "index":
            low, high = self.bounds[expr.name]
            return _convert(low, expr.dtype), _convert(high, expr.dtype)
        if expr.op == "select":
            return self.select(expr)
        if expr.op in ("and", "or", "not"):
            return _CONDITIONS[expr.op](*map(self.condition, expr.args))
        if expr.op == "sum":
            return self.sum_terms(expr)
        args = [self.analyze(arg) for arg in expr.args]
        intervals = [arg for arg in args if arg is not None]
        if len(intervals) < len(args):
            return None
        if expr.op == "load":
            return self.read_range(expr.name, intervals)
        if expr.op == "cast":
            return _cast(intervals[0], expr.args[0].dtype, expr.dtype)
        rule = _RULES.get(expr.op)
        interval = None if rule is None else rule(*intervals)
        if expr.op == "mul" and interval is not None and _may_wrap(expr):
            a, b = ([_convert(end, "float64") for end in dict.fromkeys(ends)] for ends in intervals)
            return self.widen_if_wrapping(interval, _find_extremes(x * y for x in a for y in b), expr)
        return interval

    def bind(self, value: ir.Expr) -> ir.Expr:
        return value if isinstance(value, tirx.Var | prim.IntImm | prim.FloatImm) else T.bind(self.materialize(value))

    def condition(self, expr: Expr) -> Interval:
        return self.analyze(expr) or (_FALSE, _TRUE)

    def sum_terms(self, expr: Expr) -> Interval | None:
        scaled_terms: list[tuple[int, Interval]] = []
        for factor, term in split_terms(expr):
            interval = self.analyze(term)
            if interval is None:
                return None
            scaled_terms.append((factor, interval if factor > 0 else interval[::-1]))

        def end(side: int, dtype: str) -> ir.Expr:
            scaled = (_convert(interval[side], dtype) * tirx.const(factor, dtype) for factor, interval in scaled_terms)
            return functools.reduce(lambda a, b: a + b, scaled)

        exact = end(0, expr.dtype), end(1, expr.dtype)
        return self.widen_if_wrapping(exact, (end(0, "float64"), end(1, "float64")), expr) if _may_wrap(expr) else exact

    def widen_if_wrapping(self, exact: Interval, rounded: Interval, expr: Expr) -> Interval:
        """Return the ends, or the range of the type if one is outside.

        An element that wraps may have any value; others are exact. rounded are the ends in float64.
        """
        lowest, highest = tirx.min_value(expr.dtype), tirx.max_value(expr.dtype)
        outside = self.bind(tirx.any(rounded[0] < -float(highest.value) - 1, rounded[1] >= float(highest.value) + 1))
        return prim.Select(outside, lowest, exact[0]), prim.Select(outside, highest, exact[1])

    def select(self, expr: Expr) -> Interval | None:
        condition, if_true, if_false = expr.args
        a, b = self.analyze(if_true), self.analyze(if_false)
        if a is None or b is None:
            return None
        surely, possibly = self.condition(condition)
        merges = (tirx.all, tirx.any) if expr.dtype == "bool" else (tirx.min, tirx.max)
        low, high = (prim.Select(surely, x, prim.Select(possibly, merge(x, y), y)) for merge, x, y in zip(merges, a, b))
        return low, high


_TRUE, _FALSE = tirx.const(True, "bool"), tirx.const(False, "bool")


def _convert(value: ir.Expr, dtype: str) -> ir.Expr:
    return value if scalar_type(value) == dtype else cast(value, dtype)


def _cast(value: Interval, source: str, dtype: str) -> Interval:
    """Convert an interval; a number that an integer type cannot represent becomes the range of the type."""
    low, high = value
    if dtype != "bool":
        ends = low.astype(dtype), high.astype(dtype)
        if source == "bool" or "float" in dtype or ("float" not in source and np.can_cast(source, dtype)):
            return ends
        lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        below = high < tirx.const(float(highest), source) if "float" in source else high <= tirx.const(highest, source)
        fits = tirx.all(low >= tirx.const(lowest, source), below)
        return prim.Select(fits, ends[0], tirx.const(lowest, dtype)), prim.Select(
            fits, ends[1], tirx.const(highest, dtype)
        )
    zero = tirx.const(0, source)
    surely, never = tirx.any(value[0] > zero, value[1] < zero), tirx.all(*(end.equal(zero) for end in value))
    return surely, prim.Not(never)


def _sum(a: Interval, b: Interval) -> Interval:
    return _replace_nan(a[0] + b[0], "-inf"), _replace_nan(a[1] + b[1], "inf")


def _difference(a: Interval, b: Interval) -> Interval:
    return _replace_nan(a[0] - b[1], "-inf"), _replace_nan(a[1] - b[0], "inf")


def _multiply(a: Interval, b: Interval) -> Interval:
    ends = [x * y for x in dict.fromkeys(a) for y in dict.fromkeys(b)]
    low, _ = _find_extremes(_replace_nan(end, "-inf") for end in ends)
    _, high = _find_extremes(_replace_nan(end, "inf") for end in ends)
    return low, high


def _find_extremes(ends: Iterable[ir.Expr]) -> Interval:
    ends = list(ends)
    return functools.reduce(tirx.min, ends), functools.reduce(tirx.max, ends)


def _replace_nan(end: ir.Expr, replacement: str) -> ir.Expr:
    """Return the end, or the replacement if it is NaN: infinity minus infinity, or 0 times infinity."""
    dtype = scalar_type(end)
    return prim.Select(tirx.isnan(end), tirx.const(float(replacement), dtype), end) if "float" in dtype else end


def _may_wrap(expr: Expr) -> bool:
    """Return whether an expression is one of integers from tables, some of which may be the largest of their type."""
    return "int" in expr.dtype and any(n.op == "load" and n.dtype.lstrip("u") == expr.dtype for n in expr.walk())


def _quotient(a: Interval, b: Interval) -> Interval | None:
    """Return the quotient by a positive number."""
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


def find_table_range(
    element: Callable[..., ir.Expr],
    shape: Sequence[ir.Expr],
    positions: Sequence[Interval],
    scratch: Callable[[int, str], tirx.Buffer],
) -> Interval:
    """Return the range of values of a table of that shape between two positions on each axis.

    NaN makes the interval infinite. scratch allocates memory for a number of elements of a type.
    """

    def store(buffer: tirx.Buffer, value: ir.Expr) -> None:
        T.buffer_store(buffer, value, [0])

    def clamp_position(position: ir.Expr, size: ir.Expr) -> ir.Expr:
        """Return the clamped position, in memory: TVM would simplify its definition in every access."""
        memory = scratch(1, scalar_type(position))
        store(memory, tirx.max(tirx.min(position, size - 1), 0))
        return T.bind(memory[0])

    ends = [[clamp_position(position, size) for position in pair] for size, pair in zip(shape, positions, strict=True)]
    first = [start for start, _ in ends]
    dtype = str(element(*first).ty)
    low, high, ordered = (scratch(1, kind) for kind in (dtype, dtype, "bool"))

    store(low, element(*first))
    store(high, element(*first))
    store(ordered, _TRUE)
    is_float = dtype.startswith("float")
    with ExitStack() as loops:
        steps = [loops.enter_context(T.serial(end - start + 1)) for start, end in ends]
        x = T.bind(element(*(start + step for start, step in zip(first, steps))))
        if dtype == "bool":
            store(low, tirx.all(low[0], x))
            store(high, tirx.any(high[0], x))
        else:
            store(low, tirx.min(low[0], x))
            store(high, tirx.max(high[0], x))
        if is_float:
            store(ordered, tirx.all(ordered[0], x <= tirx.const(float("inf"), dtype)))
    if not is_float:
        return low[0], high[0]
    infinity = tirx.const(float("inf"), dtype)
    return prim.Select(ordered[0], low[0], -infinity), prim.Select(ordered[0], high[0], infinity)
