"""A change of scores taken apart into what a record knows by name: a soft cap, a mask, and a change that is left.

Kernels skip tiles of keys that a mask hides, and have a tanh of their own for soft caps; a change of scores is
evaluated for every pair.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from .expr.node import Expr, canonical, number, over, rewritten
from .scores import HIDDEN


@dataclass(frozen=True)
class Split:
    """A score s becomes change(softcap * tanh(s / softcap)) + mask. softcap 0 is none, and None nothing to be done.

    The mask is over (b, h, i, j) alone, bool (True is visible) or a number to be added, -inf where it hides a key.
    """

    softcap: float
    change: Expr | None
    mask: Expr | None


def split(value: Expr) -> Split:
    """The parts of the new score `value`.

    A score that becomes -inf is hidden, even where it would have been NaN.
    """
    parts = _Parts.of(value)
    softcap, change = _without_cap(parts.rest)
    return Split(softcap, None if _is_score(change) else canonical(change), parts.mask())


@dataclass(frozen=True)
class _Parts:
    """rest + the terms where all conditions hold, else -inf."""

    rest: Expr
    terms: tuple[Expr, ...] = ()
    conditions: tuple[Expr, ...] = ()

    @staticmethod
    def of(value: Expr) -> _Parts:
        if value.op == "select" and not _uses_score(value.args[0]):
            condition, yes, no = value.args
            if _is_minus_infinity(no):
                return _Parts.of(yes).where(condition)
            if _is_minus_infinity(yes):
                return _Parts.of(no).where(Expr("not", "bool", (condition,)))
        if value.op == "add":
            for term, other in (value.args, reversed(value.args)):
                if not _uses_score(term) and _may_hide(term):
                    return _Parts.of(other).plus(term)
                if not _uses_score(term):
                    inner = _Parts.of(other)
                    return replace(inner, rest=replace(value, args=(inner.rest, term)))
        return _Parts(value)

    def where(self, condition: Expr) -> _Parts:
        return replace(self, conditions=(*self.conditions, condition))

    def plus(self, term: Expr) -> _Parts:
        inner = _Parts.of(term)
        terms = () if inner.rest.op == "number" and inner.rest.number == 0 else (inner.rest,)
        return _Parts(self.rest, (*self.terms, *terms), (*self.conditions, *inner.conditions))

    def mask(self) -> Expr | None:
        condition, total = _all("and", self.conditions), _all("add", self.terms)
        if condition is not None and total is not None:
            return canonical(Expr("select", total.dtype, (condition, total, number(-math.inf, total.dtype))))
        mask = condition or total
        return None if mask is None else canonical(mask)


def _all(op: str, parts: tuple[Expr, ...]) -> Expr | None:
    return functools.reduce(lambda a, b: Expr(op, a.dtype, (a, b)), parts) if parts else None


def _may_hide(term: Expr) -> bool:
    """Whether a term is likely to hide keys: by a literal, or by a table that has one number for each key, as padding
    has. Others, such as a bias by distance, cost less in the change of scores."""
    for node in term.walk():
        if node.op == "number" and "float" in node.dtype and node.number <= HIDDEN:
            return True
        if node.op == "load" and "float" in node.dtype and "j" in over(node) and "i" not in over(node):
            return True
    return False


def _without_cap(value: Expr) -> tuple[float, Expr]:
    """The soft cap through which alone the value depends on the score, and the value of what it leaves; 0 for none."""
    caps = {cap for node in value.walk() if (cap := _cap(node))}
    if len(caps) != 1:
        return 0.0, value
    (cap,) = caps
    capped = Expr("index", value.dtype, value="capped")
    rest = rewritten(value, lambda node: replace(capped, dtype=node.dtype) if _cap(node) else None)
    if _uses_score(rest):
        return 0.0, value
    return cap, rewritten(rest, lambda node: replace(node, value="s") if node.value == "capped" else None)


def _cap(node: Expr) -> float:
    """c of c * tanh(s / c), or of c * tanh(s * (1 / c)) as the type rounds it; 0 for anything else."""
    if node.op != "mul":
        return 0.0
    for cap, curve in (node.args, reversed(node.args)):
        if cap.op != "number" or curve.op.rpartition(".")[2] != "tanh" or not cap.number > 0:
            continue
        inner = curve.args[0]
        if inner.op == "div" and _is_score(inner.args[0]) and inner.args[1] == cap:
            return float(cap.number)
        if inner.op == "mul" and any(map(_is_score, inner.args)):
            factor = next(arg for arg in inner.args if not _is_score(arg))
            rounded = np.dtype(cap.dtype).type(1) / np.dtype(cap.dtype).type(cap.number)
            if factor.op == "number" and factor.number == rounded:
                return float(cap.number)
    return 0.0


def _is_score(node: Expr) -> bool:
    return node.op == "index" and node.value == "s"


def _uses_score(node: Expr) -> bool:
    return any(map(_is_score, node.walk()))


def _is_minus_infinity(node: Expr) -> bool:
    return node.op == "number" and node.number == -math.inf
