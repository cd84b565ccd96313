"""Derivatives of expressions, as expressions: of the new score by the old one, and by elements of tables.

Derivatives are propagated from the result to its arguments, as in backpropagation. If a condition selects another
value, an argument does not contribute to the result. Its derivative is then 0, whatever the formula for it would give
(sqrt at 0, log below 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .node import Expr, canonicalize, make_number


@dataclass(frozen=True)
class Derivatives:
    """by_score is the derivative by the index s, None for 0; by_load are the derivatives by loads of floating-point
    tables.

    Each item of by_load is the load, and the derivative by the element that it reads.
    """

    by_score: Expr | None
    by_load: tuple[tuple[Expr, Expr], ...]

    def tables(self) -> tuple[str, ...]:
        """Return the names of the tables that have a derivative, in order."""
        return tuple(dict.fromkeys(load.name for load, _ in self.by_load))


def differentiate(value: Expr) -> Derivatives:
    """Return the derivatives of a floating-point expression.

    Raises ValueError for a function whose derivative is not implemented.
    """
    leaves: list[tuple[Expr, Expr]] = []
    _propagate(value, make_number(1.0, value.dtype), None, leaves)
    by_score: Expr | None = None
    by_load: list[tuple[Expr, Expr]] = []
    for leaf, derivative in leaves:
        if leaf.op == "load":
            by_load.append((canonicalize(leaf), canonicalize(derivative)))
        else:
            by_score = derivative if by_score is None else _add(by_score, derivative)
    return Derivatives(None if by_score is None else canonicalize(by_score), tuple(by_load))


def _propagate(node: Expr, adjoint: Expr, condition: Expr | None, leaves: list[tuple[Expr, Expr]]) -> None:
    """Append the derivative by each leaf to `leaves`.

    adjoint is the derivative of the result by this node, if the condition is true.
    """
    if "float" not in node.dtype or _is(adjoint, 0.0):
        return
    if node.op == "load" or (node.op == "index" and node.value == "s"):
        zero = make_number(0.0, adjoint.dtype)
        leaves.append(
            (node, adjoint if condition is None else Expr("select", adjoint.dtype, (condition, adjoint, zero)))
        )
        return
    if node.op == "select":
        test, if_true, if_false = node.args
        for branch, is_chosen in ((if_true, test), (if_false, _not(test))):
            _propagate(
                branch, adjoint, is_chosen if condition is None else Expr("and", "bool", (condition, is_chosen)), leaves
            )
        return
    if node.op in ("number", "index", "scalar", "tirx.floor"):
        return
    rule = _RULES.get(node.op)
    if rule is None:
        raise ValueError(f"{node.op.rpartition('.')[2]} has no derivative here")
    for arg, derivative in zip(node.args, rule(node, adjoint)):
        _propagate(arg, derivative, condition, leaves)


def _is(expr: Expr, value: float) -> bool:
    return expr.op == "number" and expr.number == value


def _add(a: Expr, b: Expr) -> Expr:
    return Expr("add", a.dtype, (a, b))


def _sub(a: Expr, b: Expr) -> Expr:
    return Expr("sub", a.dtype, (a, b))


def _mul(a: Expr, b: Expr) -> Expr:
    if _is(a, 1.0) or _is(b, 0.0):
        return b
    return a if _is(b, 1.0) or _is(a, 0.0) else Expr("mul", a.dtype, (a, b))


def _div(a: Expr, b: Expr) -> Expr:
    return Expr("div", a.dtype, (a, b))


def _scale(a: Expr, factor: float) -> Expr:
    return _mul(make_number(factor, a.dtype), a)


def _not(condition: Expr) -> Expr:
    return Expr("not", "bool", (condition,))


def _split_adjoint(adjoint: Expr, a: Expr, b: Expr) -> list[Expr]:
    """Return the adjoints of a and of b for the lesser of two: all of it, or half of it each if they are equal."""

    def share(less: Expr, more: Expr) -> Expr:
        equal = Expr("eq", "bool", (less, more))
        otherwise = Expr("select", adjoint.dtype, (equal, _scale(adjoint, 0.5), _zero(adjoint)))
        return Expr("select", adjoint.dtype, (Expr("lt", "bool", (less, more)), adjoint, otherwise))

    return [share(a, b), share(b, a)]


def _zero(like: Expr) -> Expr:
    return make_number(0.0, like.dtype)


def _absolute(node: Expr, adjoint: Expr) -> list[Expr]:
    (x,) = node.args
    zero = _zero(x)
    negative = Expr("select", x.dtype, (Expr("lt", "bool", (x, zero)), _scale(adjoint, -1.0), zero))
    return [Expr("select", x.dtype, (Expr("lt", "bool", (zero, x)), adjoint, negative))]


def _quotient(node: Expr, adjoint: Expr) -> list[Expr]:
    a, b = node.args
    return [_div(adjoint, b), _scale(_div(_mul(adjoint, a), Expr("mul", b.dtype, (b, b))), -1.0)]


def _power(node: Expr, adjoint: Expr) -> list[Expr]:
    """Return the adjoints of a^b: b a^(b - 1), and ln(a) a^b, 0 where a is not positive."""
    a, b = node.args
    one = make_number(1.0, a.dtype)
    by_base = _mul(adjoint, _mul(b, Expr("tirx.pow", a.dtype, (a, _sub(b, one)))))
    log = Expr("select", a.dtype, (Expr("lt", "bool", (_zero(a), a)), Expr("tirx.log", a.dtype, (a,)), _zero(a)))
    return [by_base, _mul(adjoint, _mul(node, log))]


def _tanh(node: Expr, adjoint: Expr) -> list[Expr]:
    one = make_number(1.0, node.dtype)
    return [_mul(adjoint, _sub(one, Expr("mul", node.dtype, (node, node))))]


def _narrow(adjoint: Expr, dtype: str) -> Expr:
    """Convert the adjoint of a value widened from this type; that of half precision stays wide."""
    return adjoint if dtype in (adjoint.dtype, "float16", "bfloat16") else Expr("cast", dtype, (adjoint,))


def _call(name: str, x: Expr) -> Expr:
    return Expr(f"tirx.{name}", x.dtype, (x,))


_RULES: dict[str, Callable[[Expr, Expr], list[Expr]]] = {
    "add": lambda node, d: [d, d],
    "sub": lambda node, d: [d, _scale(d, -1.0)],
    "mul": lambda node, d: [_mul(d, node.args[1]), _mul(d, node.args[0])],
    "div": _quotient,
    # Equal arguments get half of it each, as in PyTorch.
    "min": lambda node, d: _split_adjoint(d, *node.args),
    "max": lambda node, d: _split_adjoint(d, *node.args)[::-1],
    "cast": lambda node, d: [_narrow(d, node.args[0].dtype)],
    "tirx.fabs": _absolute,
    "tirx.exp": lambda node, d: [_mul(d, node)],
    "tirx.exp2": lambda node, d: [_scale(_mul(d, node), 0.6931471805599453)],
    "tirx.log": lambda node, d: [_div(d, node.args[0])],
    "tirx.tanh": _tanh,
    "tirx.sqrt": lambda node, d: [_div(d, _scale(node, 2.0))],
    "tirx.sin": lambda node, d: [_mul(d, _call("cos", node.args[0]))],
    "tirx.cos": lambda node, d: [_scale(_mul(d, _call("sin", node.args[0])), -1.0)],
    "tirx.pow": _power,
}
