"""Which reduction a stage is: how values are combined, and which."""

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
    """combine and term of a reduction that computes combine(output, term); None for other stages."""
    if not stage.reduce:
        return None

    def is_total(expr: Expr) -> bool:
        return isinstance(expr, ir.TensorLoad) and expr.source.same_as(stage.output)

    found = _combination(stage.value)
    if found is None:
        return None
    combine, a, b = found
    for total, term in ((a, b), (b, a)):
        if is_total(total) and not any(map(is_total, loads(term))):
            return combine, term
    return None


def _combination(value: Expr) -> tuple[Combine, Expr, Expr] | None:
    """The operation that a value is, and its operands."""
    combine = _COMBINE.get(type(value))
    if combine is not None:
        return combine, value.a, value.b
    return _extreme(value) if isinstance(value, prim.Select) else None


def _extreme(value: prim.Select) -> tuple[Combine, Expr, Expr] | None:
    """The larger or the smaller of two floats, NaN if either is: a > b or a is NaN ? a : b (importing/compute.py)."""
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
    """Whether a condition is that x is NaN."""
    call = isinstance(condition, ir.Call) and condition.op.name == "tirx.isnan"
    return call and prim.expr_deep_equal(condition.args[0], x)


def combine_largest(a: Expr, b: Expr) -> Expr:
    """The larger of two, NaN if either is. (a <= a is what TVM's simplifier leaves of a being a number.)"""
    return tirx.Select(a > b, a, tirx.Select(a <= a, b, a))


def combine_smallest(a: Expr, b: Expr) -> Expr:
    """The smaller of two, NaN if either is."""
    return tirx.Select(a < b, a, tirx.Select(a <= a, b, a))
