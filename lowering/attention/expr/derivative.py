"""Derivatives of expressions, as expressions: how the new score changes with the old one, and with elements of tables.

From the result to its arguments, as in backpropagation. Where a condition chose another value, an argument has no part
in the result, and its derivative is 0 whatever the formula for it would give there (sqrt at 0, log below 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .node import Expr, canonical, number


@dataclass(frozen=True)
class Derivatives:
    """by_score is that by the index s, None for 0. by_load are those by each place where a floating-point table is
    read: the load, and the derivative by what it reads."""

    by_score: Expr | None
    by_load: tuple[tuple[Expr, Expr], ...]

    def tables(self) -> tuple[str, ...]:
        """Names of the tables that have a derivative, in order."""
        return tuple(dict.fromkeys(load.name for load, _ in self.by_load))


def derivatives(value: Expr) -> Derivatives:
    """Of a floating-point expression. Raises ValueError for a function without a known derivative."""
    found: list[tuple[Expr, Expr]] = []
    _propagate(value, number(1.0, value.dtype), None, found)
    by_score: Expr | None = None
    by_load: list[tuple[Expr, Expr]] = []
    for leaf, part in found:
        if leaf.op == "load":
            by_load.append((canonical(leaf), canonical(part)))
        else:
            by_score = part if by_score is None else _add(by_score, part)
    return Derivatives(None if by_score is None else canonical(by_score), tuple(by_load))


def _propagate(node: Expr, adjoint: Expr, where: Expr | None, found: list[tuple[Expr, Expr]]) -> None:
    """Adds the parts of each leaf. adjoint is the derivative of the result by this node, where the condition holds."""
    if "float" not in node.dtype or _is(adjoint, 0.0):
        return
    if node.op == "load" or (node.op == "index" and node.value == "s"):
        zero = number(0.0, adjoint.dtype)
        found.append((node, adjoint if where is None else Expr("select", adjoint.dtype, (where, adjoint, zero))))
        return
    if node.op == "select":
        condition, yes, no = node.args
        for branch, holds in ((yes, condition), (no, _not(condition))):
            _propagate(branch, adjoint, holds if where is None else Expr("and", "bool", (where, holds)), found)
        return
    if node.op in ("number", "index", "scalar", "tirx.floor"):
        return
    rule = _RULES.get(node.op)
    if rule is None:
        raise ValueError(f"{node.op.rpartition('.')[2]} has no derivative here")
    for arg, part in zip(node.args, rule(node, adjoint)):
        _propagate(arg, part, where, found)


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


def _scaled(a: Expr, factor: float) -> Expr:
    return _mul(number(factor, a.dtype), a)


def _not(condition: Expr) -> Expr:
    return Expr("not", "bool", (condition,))


def _shares(adjoint: Expr, a: Expr, b: Expr) -> list[Expr]:
    """What the lesser of two gets, and half of it where they are equal: for a, and for b."""

    def share(less: Expr, more: Expr) -> Expr:
        equal = Expr("eq", "bool", (less, more))
        otherwise = Expr("select", adjoint.dtype, (equal, _scaled(adjoint, 0.5), _zero(adjoint)))
        return Expr("select", adjoint.dtype, (Expr("lt", "bool", (less, more)), adjoint, otherwise))

    return [share(a, b), share(b, a)]


def _zero(like: Expr) -> Expr:
    return number(0.0, like.dtype)


def _absolute(node: Expr, adjoint: Expr) -> list[Expr]:
    (x,) = node.args
    zero = _zero(x)
    negative = Expr("select", x.dtype, (Expr("lt", "bool", (x, zero)), _scaled(adjoint, -1.0), zero))
    return [Expr("select", x.dtype, (Expr("lt", "bool", (zero, x)), adjoint, negative))]


def _quotient(node: Expr, adjoint: Expr) -> list[Expr]:
    a, b = node.args
    return [_div(adjoint, b), _scaled(_div(_mul(adjoint, a), Expr("mul", b.dtype, (b, b))), -1.0)]


def _power(node: Expr, adjoint: Expr) -> list[Expr]:
    """Of a^b: b a^(b - 1), and ln(a) a^b, 0 where a is not positive."""
    a, b = node.args
    one = number(1.0, a.dtype)
    by_base = _mul(adjoint, _mul(b, Expr("tirx.pow", a.dtype, (a, _sub(b, one)))))
    log = Expr("select", a.dtype, (Expr("lt", "bool", (_zero(a), a)), Expr("tirx.log", a.dtype, (a,)), _zero(a)))
    return [by_base, _mul(adjoint, _mul(node, log))]


def _tanh(node: Expr, adjoint: Expr) -> list[Expr]:
    one = number(1.0, node.dtype)
    return [_mul(adjoint, _sub(one, Expr("mul", node.dtype, (node, node))))]


def _narrowed(adjoint: Expr, dtype: str) -> Expr:
    """The adjoint of what was widened from this type; that of half precision stays wide."""
    return adjoint if dtype in (adjoint.dtype, "float16", "bfloat16") else Expr("cast", dtype, (adjoint,))


def _call(name: str, x: Expr) -> Expr:
    return Expr(f"tirx.{name}", x.dtype, (x,))


_RULES: dict[str, Callable[[Expr, Expr], list[Expr]]] = {
    "add": lambda node, d: [d, d],
    "sub": lambda node, d: [d, _scaled(d, -1.0)],
    "mul": lambda node, d: [_mul(d, node.args[1]), _mul(d, node.args[0])],
    "div": _quotient,
    # Of equal arguments each has half of it, as in PyTorch.
    "min": lambda node, d: _shares(d, *node.args),
    "max": lambda node, d: _shares(d, *node.args)[::-1],
    "cast": lambda node, d: [_narrowed(d, node.args[0].dtype)],
    "tirx.fabs": _absolute,
    "tirx.exp": lambda node, d: [_mul(d, node)],
    "tirx.exp2": lambda node, d: [_scaled(_mul(d, node), 0.6931471805599453)],
    "tirx.log": lambda node, d: [_div(d, node.args[0])],
    "tirx.tanh": _tanh,
    "tirx.sqrt": lambda node, d: [_div(d, _scaled(node, 2.0))],
    "tirx.sin": lambda node, d: [_mul(d, _call("cos", node.args[0]))],
    "tirx.cos": lambda node, d: [_scaled(_mul(d, _call("sin", node.args[0])), -1.0)],
    "tirx.pow": _power,
}
