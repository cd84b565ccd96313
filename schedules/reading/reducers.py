"""The reduction that a stage computes: its combining operation and its term."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx
from tvm.ir import prim

from lowering.tensorir.expressions import Expr, loads

from .stages import Stage

Combine = Callable[[Expr, Expr], Expr]

_COMBINE: dict[type, Combine] = {
    prim.Add: lambda a, b: a + b,
    prim.Mul: lambda a, b: a * b,
    prim.Max: tirx.max,
    prim.Min: tirx.min,
}


def read_term(stage: Stage) -> tuple[Combine, Expr] | None:
    """Return combine and term of a reduction that computes combine(output, term); None for other stages."""
    if not stage.reduce:
        return None

    def is_total(expr: Expr) -> bool:
        return isinstance(expr, ir.TensorLoad) and expr.source.same_as(stage.output)

    combination = _read_combination(stage.value)
    if combination is None:
        return None
    combine, a, b = combination
    for total, term in ((a, b), (b, a)):
        if is_total(total) and not any(map(is_total, loads(term))):
            return combine, term
    return None


def _read_combination(value: Expr) -> tuple[Combine, Expr, Expr] | None:
    """Return the operation of a value, and its operands."""
    combine = _COMBINE.get(type(value))
    if combine is not None:
        return combine, value.a, value.b
    return _read_extreme(value) if isinstance(value, prim.Select) else None


def _read_extreme(value: prim.Select) -> tuple[Combine, Expr, Expr] | None:
    """Return the maximum or minimum of two floats, NaN if either is NaN.

    The pattern is a > b or a is NaN ? a : b (ops/helpers/compute.py).
    """
    inner = value.false_value
    if not isinstance(value.condition, prim.GT | prim.LT) or not isinstance(inner, prim.Select):
        return None
    a, b = value.condition.a, value.condition.b
    is_nan = _is_nan(inner.condition, a)
    same = ((value.true_value, a), (inner.true_value, a), (inner.false_value, b))
    if not is_nan or not all(prim.expr_deep_equal(x, y) for x, y in same):
        return None
    return (combine_largest if isinstance(value.condition, prim.GT) else combine_smallest), a, b


def _is_nan(condition: Expr, x: Expr) -> bool:
    """Return whether a condition is that x is NaN."""
    call = isinstance(condition, ir.Call) and condition.op.name == "tirx.isnan"
    return call and prim.expr_deep_equal(condition.args[0], x)


def combine_largest(a: Expr, b: Expr) -> Expr:
    """Return the larger of two, NaN if either is NaN.

    (TVM's simplifier reduces the test that a is a number to a <= a.)
    """
    return tirx.Select(a > b, a, tirx.Select(a <= a, b, a))


def combine_smallest(a: Expr, b: Expr) -> Expr:
    """Return the smaller of two, NaN if either is NaN."""
    return tirx.Select(a < b, a, tirx.Select(a <= a, b, a))
