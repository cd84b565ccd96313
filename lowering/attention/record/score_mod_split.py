"""A score modification, split into parts that a record has fields for: a soft cap, a mask, and a remaining
modification.

Kernels skip tiles of keys that a mask hides, and have a tanh of their own for soft caps; a score modification is
evaluated for every pair.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from ..codegen.scores import HIDDEN_BIAS
from ..expr.node import Expr, canonicalize, find_indices, make_number, rewrite_expr


@dataclass(frozen=True)
class ScoreModSplit:
    """A score s becomes score_mod(softcap * tanh(s / softcap)) + mask.

    softcap 0 stands for no soft cap, and score_mod None for the identity. The mask is over (b, h, i, j) alone. It is
    bool (True is visible) or a number to be added, -inf where it masks a key.
    """

    softcap: float
    score_mod: Expr | None
    mask: Expr | None


def split_score_mod(value: Expr) -> ScoreModSplit:
    """Split the new score `value`.

    A score that becomes -inf is masked, even where it would have been NaN.
    """
    terms = _ScoreTerms.from_expr(value)
    softcap, score_mod = _remove_softcap(terms.rest)
    return ScoreModSplit(softcap, None if _is_score(score_mod) else canonicalize(score_mod), terms.mask())


@dataclass(frozen=True)
class _ScoreTerms:
    """rest + the terms where all conditions are true, else -inf."""

    rest: Expr
    terms: tuple[Expr, ...] = ()
    conditions: tuple[Expr, ...] = ()

    @staticmethod
    def from_expr(value: Expr) -> _ScoreTerms:
        if value.op == "select" and not _has_score(value.args[0]):
            condition, if_true, if_false = value.args
            if _is_minus_infinity(if_false):
                return _ScoreTerms.from_expr(if_true).add_condition(condition)
            if _is_minus_infinity(if_true):
                return _ScoreTerms.from_expr(if_false).add_condition(Expr("not", "bool", (condition,)))
        if value.op == "add":
            for term, other in (value.args, reversed(value.args)):
                if not _has_score(term) and _can_hide_keys(term):
                    return _ScoreTerms.from_expr(other).add_term(term)
                if not _has_score(term):
                    inner = _ScoreTerms.from_expr(other)
                    return replace(inner, rest=replace(value, args=(inner.rest, term)))
        return _ScoreTerms(value)

    def add_condition(self, condition: Expr) -> _ScoreTerms:
        return replace(self, conditions=(*self.conditions, condition))

    def add_term(self, term: Expr) -> _ScoreTerms:
        inner = _ScoreTerms.from_expr(term)
        terms = () if inner.rest.op == "number" and inner.rest.number == 0 else (inner.rest,)
        return _ScoreTerms(self.rest, (*self.terms, *terms), (*self.conditions, *inner.conditions))

    def mask(self) -> Expr | None:
        condition, total = _combine("and", self.conditions), _combine("add", self.terms)
        if condition is not None and total is not None:
            return canonicalize(Expr("select", total.dtype, (condition, total, make_number(-math.inf, total.dtype))))
        mask = condition or total
        return None if mask is None else canonicalize(mask)


def _combine(op: str, operands: tuple[Expr, ...]) -> Expr | None:
    return functools.reduce(lambda a, b: Expr(op, a.dtype, (a, b)), operands) if operands else None


def _can_hide_keys(term: Expr) -> bool:
    """Return whether a term is likely to mask keys.

    Such a term has a low literal, or a table with one number for each key, as padding has. Others, such as a bias by
    distance, cost less in the score modification.
    """
    for node in term.walk():
        if node.op == "number" and "float" in node.dtype and node.number <= HIDDEN_BIAS:
            return True
        if node.op == "load" and "float" in node.dtype and "j" in find_indices(node) and "i" not in find_indices(node):
            return True
    return False


def _remove_softcap(value: Expr) -> tuple[float, Expr]:
    """Return the soft cap, 0 for none, and the value as a function of the capped score.

    There is a soft cap only if the value depends on the score through it alone.
    """
    caps = {cap for node in value.walk() if (cap := _read_softcap(node))}
    if len(caps) != 1:
        return 0.0, value
    (cap,) = caps
    capped = Expr("index", value.dtype, value="capped")
    rest = rewrite_expr(value, lambda node: replace(capped, dtype=node.dtype) if _read_softcap(node) else None)
    if _has_score(rest):
        return 0.0, value
    return cap, rewrite_expr(rest, lambda node: replace(node, value="s") if node.value == "capped" else None)


def _read_softcap(node: Expr) -> float:
    """Return c of c * tanh(s / c), or of c * tanh(s * (1 / c)) as the type rounds it; 0 for anything else."""
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


def _has_score(node: Expr) -> bool:
    return any(map(_is_score, node.walk()))


def _is_minus_infinity(node: Expr) -> bool:
    return node.op == "number" and node.number == -math.inf
