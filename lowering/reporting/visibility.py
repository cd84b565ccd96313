"""Which keys a row sees, as far as that is known before a model runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from ..attention.expr import evaluate
from ..attention.expr.node import Expr, terms
from ..attention.formula import Formula
from ..attention.problem import AttentionProblem, Mask
from ..attention.reference import sees
from ..attention.scores import HIDDEN

NEVER, BY_DATA, CHANGED, ALWAYS = range(4)
"""Of a row and a key: hidden; hidden or not, as data says; seen, with something added to the score; seen as it is."""

Interval = tuple[np.ndarray, np.ndarray]
"""The least and the largest value that elements can have; of conditions whether they surely and possibly hold."""


def visibility(problem: AttentionProblem, rows: int, keys: int, scalars: Mapping[str, int]) -> np.ndarray:
    """[rows, keys] of NEVER to ALWAYS, in batch 0 and query head 0.

    scalars are those of the problem's integer parameters that are known. Lengths are taken to be those of full caches.
    """
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    before = sees(problem, 0, i, j, rows, _full(problem, rows, keys, scalars))
    shown = _shown(problem.mask, i, j, scalars)
    return np.where(np.broadcast_to(before, (rows, keys)), shown, NEVER)


def before_mask(problem: AttentionProblem, rows: int, keys: int, scalars: Mapping[str, int]) -> np.ndarray:
    """[rows, keys], whether ranges of keys let a row see a key: what the kernels' loops go over."""
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    return np.broadcast_to(sees(problem, 0, i, j, rows, _full(problem, rows, keys, scalars)), (rows, keys))


def _full(problem: AttentionProblem, rows: int, keys: int, scalars: Mapping[str, int]) -> dict[str, object]:
    """What runs would give, for caches that are full and windows that are as wide as they can be."""
    given: dict[str, object] = {"past": scalars.get("past", keys - rows), "free_batches": 0}
    given |= {"lefts": np.array([keys]), "sink_keys": np.array([0])}
    behind = problem.window is not None and problem.window.offset == "behind"
    if problem.lengths:
        given["lengths"] = np.array([keys - rows if behind and keys > rows else keys])
    return given


def _shown(mask: Mask | Formula | None, i: np.ndarray, j: np.ndarray, scalars: Mapping[str, int]) -> np.ndarray:
    """What the mask alone makes of pairs; broadcasts to [rows, keys]."""
    if mask is None:
        return np.array(ALWAYS)
    if isinstance(mask, Mask):
        return np.array(BY_DATA)
    zero = np.zeros((1, 1), np.int64)
    low, high = _Bounds({"b": zero, "h": zero, "i": i, "j": j}, scalars).of(mask.value)
    selects = mask.dtype == "bool"
    surely, possibly = (low, high) if selects else (low > HIDDEN, high > HIDDEN)
    if mask.short:
        inside = j < scalars.get("mask_keys", 0)
        surely, possibly = surely & inside, possibly & (inside | ("mask_keys" not in scalars))
    seen = np.where(np.logical_or(selects, (low == 0) & (high == 0)), ALWAYS, CHANGED)
    return np.where(surely, seen, np.where(possibly, BY_DATA, NEVER))


class _Bounds:
    """The interval of each element of an expression whose tables may hold anything."""

    def __init__(self, point: Mapping[str, np.ndarray], scalars: Mapping[str, int]) -> None:
        self.point, self.scalars = point, scalars

    def of(self, expr: Expr) -> Interval:
        if self._is_known(expr):
            value = evaluate.evaluate(expr, self.point, self.scalars)
            return (value, value) if expr.dtype == "bool" else (value.astype(np.float64), value.astype(np.float64))
        if expr.op == "select":
            condition, yes, no = map(self.of, expr.args)
            surely, possibly = condition
            merge = (np.logical_and, np.logical_or) if expr.dtype == "bool" else (np.minimum, np.maximum)
            low, high = (np.where(surely, a, np.where(possibly, both(a, b), b)) for both, a, b in zip(merge, yes, no))
            return low, high
        if expr.op == "sum":
            parts = [(factor, self.of(term)) for factor, term in terms(expr)]
            ends = [(f * a, f * b) if f > 0 else (f * b, f * a) for f, (a, b) in parts]
            return functools.reduce(_sum, ends)
        if expr.op == "cast":
            return _cast(self.of(expr.args[0]), expr.dtype)
        rule = _RULES.get(expr.op)
        if rule is None:
            return _ANY if expr.dtype != "bool" else (np.array(False), np.array(True))
        return rule(*map(self.of, expr.args))

    def _is_known(self, expr: Expr) -> bool:
        return not any(
            node.op == "load" or (node.op == "scalar" and node.name not in self.scalars) for node in expr.walk()
        )


_ANY = np.array(-np.inf), np.array(np.inf)


def _ordered(low: np.ndarray, high: np.ndarray) -> Interval:
    """Ends that are infinity less infinity may be anything."""
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


def _sum(a: Interval, b: Interval) -> Interval:
    return _ordered(a[0] + b[0], a[1] + b[1])


def _cast(value: Interval, dtype: str) -> Interval:
    low, high = value
    if dtype == "bool":
        return (low > 0) | (high < 0), (low != 0) | (high != 0)
    return low.astype(np.float64), high.astype(np.float64)


def _equal(a: Interval, b: Interval) -> Interval:
    surely = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return surely, (a[0] <= b[1]) & (b[0] <= a[1])


def _not(a: Interval) -> Interval:
    return ~a[1], ~a[0]


_RULES: dict[str, Callable[..., Interval]] = {
    "and": lambda a, b: (a[0] & b[0], a[1] & b[1]),
    "or": lambda a, b: (a[0] | b[0], a[1] | b[1]),
    "not": _not,
    "add": _sum,
    "sub": lambda a, b: _ordered(a[0] - b[1], a[1] - b[0]),
    "min": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "max": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "lt": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "le": lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
}
