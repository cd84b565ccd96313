"""Interval analysis: bounds of the values of an expression over a tile of indices.

Numbers have (lowest, highest). Conditions have (surely, possibly): whether they are true everywhere, and somewhere.

The rules are independent of what an end of an interval is. It is TensorIR that a kernel computes for each tile
(emit_interval.py), or an array with an element for each pair (evaluate_interval.py).
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .node import Expr, split_terms

Interval = tuple[Any, Any]


class IntervalAnalysis(abc.ABC):
    """Computes the intervals of expressions, each once; a subclass says what an end is.

    Ends have Python's arithmetic and comparisons by < and <=. `ops` has other operations on them, by the names of
    expressions; "all" and "any" are "and" and "or" of any number of ends.
    """

    ops: ClassVar[Mapping[str, Callable[..., Any]]]

    def __init__(self) -> None:
        self.intervals: dict[Expr, Interval | None] = {}

    @abc.abstractmethod
    def make_constant(self, value: float, dtype: str) -> Any: ...

    @abc.abstractmethod
    def read_constant(self, end: Any) -> float | None:
        """Return the number that an end is."""

    @abc.abstractmethod
    def convert(self, end: Any, dtype: str) -> Any:
        """Return an end in another type."""

    @abc.abstractmethod
    def replace_nan(self, end: Any, replacement: float) -> Any:
        """Return an end, or the replacement if it is NaN: infinity minus infinity, or 0 times infinity."""

    @abc.abstractmethod
    def read_leaf(self, expr: Expr) -> Interval | None:
        """Return the interval of a scalar or an index; None if it is unknown."""

    @abc.abstractmethod
    def read_table(self, expr: Expr, positions: Sequence[Interval]) -> Interval | None:
        """Return the range of values of a table between two positions on each axis, both included; None if unknown."""

    def make_unknown(self, dtype: str) -> Interval | None:
        """Return the interval of an expression that has no rule; None without infinite ends."""
        if dtype != "bool":
            return None
        return self.make_constant(False, dtype), self.make_constant(True, dtype)

    def bind(self, end: Any) -> Any:
        """Return an end that is computed once."""
        return end

    def analyze(self, expr: Expr) -> Interval | None:
        """Return the interval of `expr`, both ends included; None if it is unknown."""
        if expr not in self.intervals:
            self.intervals[expr] = self.compute(expr)
        return self.intervals[expr]

    def compute(self, expr: Expr) -> Interval | None:
        result = self._combine(expr)
        if result is None:
            return self.make_unknown(expr.dtype)
        low = self.bind(result[0])
        return low, low if result[0] is result[1] else self.bind(result[1])

    def _combine(self, expr: Expr) -> Interval | None:
        if expr.op == "number":
            value = self.make_constant(expr.number, expr.dtype)
            return value, value
        if expr.op in ("scalar", "index"):
            return self.read_leaf(expr)
        if expr.op == "select":
            return self._select(expr)
        if expr.op == "sum":
            return self._sum_terms(expr)
        args = [self.analyze(arg) for arg in expr.args]
        intervals = [arg for arg in args if arg is not None]
        if len(intervals) < len(args):
            return None
        if expr.op == "load":
            return self.read_table(expr, intervals)
        rule = _RULES.get(expr.op)
        interval = None if rule is None else rule(self, expr, *intervals)
        if expr.op == "mul" and interval is not None and _may_wrap(expr):
            a, b = (tuple(self.convert(end, "float64") for end in _list_distinct(ends)) for ends in intervals)
            return self._widen_if_wrapping(interval, _find_extremes(self, [x * y for x in a for y in b]), expr)
        return interval

    def _sum_terms(self, expr: Expr) -> Interval | None:
        scaled_terms: list[tuple[int, Interval]] = []
        for factor, term in split_terms(expr):
            interval = self.analyze(term)
            if interval is None:
                return None
            scaled_terms.append((factor, interval if factor > 0 else interval[::-1]))

        def end(side: int, dtype: str) -> Any:
            scaled = (
                self.convert(interval[side], dtype) * self.make_constant(factor, dtype)
                for factor, interval in scaled_terms
            )
            return functools.reduce(lambda a, b: a + b, scaled)

        exact = end(0, expr.dtype), end(1, expr.dtype)
        return (
            self._widen_if_wrapping(exact, (end(0, "float64"), end(1, "float64")), expr) if _may_wrap(expr) else exact
        )

    def _widen_if_wrapping(self, exact: Interval, rounded: Interval, expr: Expr) -> Interval:
        """Return the ends, or the range of the type if one is outside.

        An element that wraps may have any value; others are exact. rounded are the ends in float64.
        """
        limits = np.iinfo(expr.dtype)
        is_below, is_above = rounded[0] < -float(limits.max) - 1, rounded[1] >= float(limits.max) + 1
        outside = self.bind(self.ops["any"](is_below, is_above))
        lowest, highest = (self.make_constant(int(limit), expr.dtype) for limit in (limits.min, limits.max))
        return self.ops["select"](outside, lowest, exact[0]), self.ops["select"](outside, highest, exact[1])

    def _select(self, expr: Expr) -> Interval | None:
        condition, if_true, if_false = expr.args
        a, b = self.analyze(if_true), self.analyze(if_false)
        if a is None or b is None:
            return None
        condition_interval = self.analyze(condition)
        assert condition_interval is not None
        surely, possibly = condition_interval
        merges = [self.ops[name] for name in (("all", "any") if expr.dtype == "bool" else ("min", "max"))]
        low, high = (
            self.ops["select"](surely, x, self.ops["select"](possibly, merge(x, y), y))
            for merge, x, y in zip(merges, a, b)
        )
        return low, high


def _may_wrap(expr: Expr) -> bool:
    """Return whether an expression is one of integers from tables, some of which may be the largest of their type."""
    return "int" in expr.dtype and any(n.op == "load" and n.dtype.lstrip("u") == expr.dtype for n in expr.walk())


def _list_distinct(ends: Interval) -> Interval | tuple[Any]:
    return ends[:1] if ends[0] is ends[1] else ends


def _find_extremes(analysis: IntervalAnalysis, ends: Sequence[Any]) -> Interval:
    return functools.reduce(analysis.ops["min"], ends), functools.reduce(analysis.ops["max"], ends)


def _bound(analysis: IntervalAnalysis, low: Any, high: Any) -> Interval:
    """Return an interval whose ends that are infinity minus infinity, or 0 times infinity, are infinite."""
    return analysis.replace_nan(low, float("-inf")), analysis.replace_nan(high, float("inf"))


def _cast(analysis: IntervalAnalysis, expr: Expr, value: Interval) -> Interval:
    """Convert an interval; a number that an integer type cannot represent becomes the range of the type."""
    low, high = value
    source, dtype = expr.args[0].dtype, expr.dtype
    if dtype != "bool":
        ends = analysis.convert(low, dtype), analysis.convert(high, dtype)
        if source == "bool" or "float" in dtype or ("float" not in source and np.can_cast(source, dtype)):
            return ends
        lowest, highest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        limit = analysis.make_constant(highest, source)
        fits = analysis.ops["all"](
            low >= analysis.make_constant(lowest, source), high < limit if "float" in source else high <= limit
        )
        lowest_end, highest_end = analysis.make_constant(lowest, dtype), analysis.make_constant(highest, dtype)
        return analysis.ops["select"](fits, ends[0], lowest_end), analysis.ops["select"](fits, ends[1], highest_end)
    zero = analysis.make_constant(0, source)
    surely, never = (
        analysis.ops["any"](low > zero, high < zero),
        analysis.ops["all"](*(analysis.ops["eq"](end, zero) for end in value)),
    )
    return surely, analysis.ops["not"](never)


def _combine_ends(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval:
    """Return the interval of a function that never decreases with either argument."""
    return analysis.ops[expr.op](a[0], b[0]), analysis.ops[expr.op](a[1], b[1])


def _add(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval:
    return _bound(analysis, a[0] + b[0], a[1] + b[1])


def _subtract(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval:
    return _bound(analysis, a[0] - b[1], a[1] - b[0])


def _multiply(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval:
    ends = [_bound(analysis, end, end) for end in (x * y for x in _list_distinct(a) for y in _list_distinct(b))]
    lows, highs = zip(*ends)
    return functools.reduce(analysis.ops["min"], lows), functools.reduce(analysis.ops["max"], highs)


def _divide(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval | None:
    """Return the quotient by a positive number; that of integers is rounded down."""
    divisor, is_float = b[0], "float" in expr.dtype
    if not (analysis.read_constant(divisor) or 0) > 0 or (expr.op == "div" and not is_float):
        return None
    divide = operator.truediv if is_float else analysis.ops["floordiv"]
    return divide(a[0], divisor), divide(a[1], divisor)


def _remainder(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval | None:
    divisor = b[0]
    if not (analysis.read_constant(divisor) or 0) > 0 or "float" in expr.dtype:
        return None
    same = analysis.ops["eq"](analysis.ops["floordiv"](a[0], divisor), analysis.ops["floordiv"](a[1], divisor))
    low = analysis.ops["select"](same, analysis.ops["floormod"](a[0], divisor), analysis.make_constant(0, expr.dtype))
    return low, analysis.ops["select"](same, analysis.ops["floormod"](a[1], divisor), divisor - 1)


def _equal(analysis: IntervalAnalysis, expr: Expr, a: Interval, b: Interval) -> Interval:
    surely = analysis.ops["all"](
        analysis.ops["eq"](a[0], a[1]), analysis.ops["eq"](b[0], b[1]), analysis.ops["eq"](a[0], b[0])
    )
    return surely, analysis.ops["all"](a[0] <= b[1], b[0] <= a[1])


def _not(analysis: IntervalAnalysis, expr: Expr, a: Interval) -> Interval:
    surely, possibly = a
    return analysis.ops["not"](possibly), analysis.ops["not"](surely)


_RULES: dict[str, Callable[..., Interval | None]] = {
    **dict.fromkeys(("and", "or", "min", "max"), _combine_ends),
    "not": _not,
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "cast": _cast,
    "div": _divide,
    "floordiv": _divide,
    "floormod": _remainder,
    "lt": lambda analysis, expr, a, b: (a[1] < b[0], a[0] < b[1]),
    "le": lambda analysis, expr, a, b: (a[1] <= b[0], a[0] <= b[1]),
    "eq": _equal,
    "ne": lambda analysis, expr, a, b: _not(analysis, expr, _equal(analysis, expr, a, b)),
}
