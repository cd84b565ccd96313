"""Scalar expressions of sizes as C expressions of int64_t, double for those in float64, and int for conditions."""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, tirx
from tvm.ir import prim

from ..tensorir.expressions import Expr

_OPERATORS: dict[type, str] = {
    prim.Add: "+", prim.Sub: "-", prim.Mul: "*", prim.Div: "/", prim.Mod: "%", prim.And: "&&", prim.Or: "||",
    prim.EQ: "==", prim.NE: "!=", prim.LT: "<", prim.LE: "<=", prim.GT: ">", prim.GE: ">=",
}  # fmt: skip
_FUNCTIONS: dict[type, str] = {
    prim.Min: "min_of", prim.Max: "max_of", prim.FloorDiv: "floor_div", prim.FloorMod: "floor_mod",
}  # fmt: skip
_TYPES = {"int64": "int64_t", "int32": "int32_t", "float64": "double", "bool": "int"}


class UnsupportedExpressionError(Exception):
    """An expression cannot be written in C; the argument is its operation."""


def to_c(expr: Expr, name: Callable[[tirx.Var], str]) -> str:
    """Return C code of an expression. `name` returns that of a variable.

    Raises:
        UnsupportedExpressionError: The expression has another operation than arithmetic, comparison and selection.
    """
    if isinstance(expr, ir.Var):
        return name(expr)
    if isinstance(expr, prim.IntImm):
        return f"INT64_C({int(expr.value)})" if abs(int(expr.value)) >= 2**31 else str(int(expr.value))
    if isinstance(expr, prim.FloatImm):
        return float(expr.value).hex()
    if isinstance(expr, prim.Cast):
        return f"({_name_type(expr)})({to_c(expr.value, name)})"
    if isinstance(expr, prim.Not):
        return f"!({to_c(expr.a, name)})"
    if isinstance(expr, prim.Select):
        condition, value, other = (to_c(e, name) for e in (expr.condition, expr.true_value, expr.false_value))
        return f"({condition} ? {value} : {other})"
    if isinstance(expr, ir.Call) and getattr(expr.op, "name", "") == "prim.if_then_else":
        condition, value, other = (to_c(e, name) for e in expr.args)
        return f"({condition} ? {value} : {other})"
    if type(expr) in _OPERATORS:
        return f"({to_c(expr.a, name)} {_OPERATORS[type(expr)]} {to_c(expr.b, name)})"
    if type(expr) in _FUNCTIONS:
        prefix = "double_" if str(expr.ty) == "float64" else ""
        return f"{prefix}{_FUNCTIONS[type(expr)]}({to_c(expr.a, name)}, {to_c(expr.b, name)})"
    raise UnsupportedExpressionError(str(getattr(getattr(expr, "op", None), "name", type(expr).__name__)))


def _name_type(expr: Expr) -> str:
    kind = str(expr.ty)
    if kind not in _TYPES:
        raise UnsupportedExpressionError(f"a conversion to {kind}")
    return _TYPES[kind]
