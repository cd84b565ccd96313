"""Visible keys of each row, as far as they follow from sizes before a model runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from ..attention.codegen.scores import HIDDEN_BIAS
from ..attention.expr import evaluate
from ..attention.expr.node import Expr, split_terms
from ..attention.record.formula import Formula
from ..attention.record.problem import AttentionProblem, Mask
from ..attention.reference import find_visible_keys

NEVER, BY_DATA, CHANGED, ALWAYS = range(4)
"""States of a row and a key: hidden; hidden depending on data; visible with a modified score; visible as it is."""

Interval = tuple[np.ndarray, np.ndarray]
"""Lower and upper bounds of elements; for conditions whether they always and sometimes hold."""


def compute_visibility(problem: AttentionProblem, rows: int, keys: int, scalars: Mapping[str, int]) -> np.ndarray:
    """Return [rows, keys] of NEVER to ALWAYS, in batch 0 and query head 0.

    scalars are the bound integer parameters of the problem. Lengths are those of full caches.
    """
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    in_range = find_visible_keys(problem, 0, i, j, rows, _make_full_cache_values(problem, rows, keys, scalars))
    mask_states = _compute_mask_states(problem.mask, i, j, scalars)
    return np.where(np.broadcast_to(in_range, (rows, keys)), mask_states, NEVER)


def compute_visible_ranges(problem: AttentionProblem, rows: int, keys: int, scalars: Mapping[str, int]) -> np.ndarray:
    """Return [rows, keys]: whether the key ranges that the kernels' loops cover let a row see a key."""
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    return np.broadcast_to(
        find_visible_keys(problem, 0, i, j, rows, _make_full_cache_values(problem, rows, keys, scalars)), (rows, keys)
    )


def _make_full_cache_values(
    problem: AttentionProblem, rows: int, keys: int, scalars: Mapping[str, int]
) -> dict[str, object]:
    """Return run-time values for full caches and windows of maximum width."""
    values: dict[str, object] = {"past": scalars.get("past", keys - rows), "free_batches": 0}
    values |= {"lefts": np.array([keys]), "sink_keys": np.array([0])}
    is_after_cache = problem.window is not None and problem.window.offset == "behind"
    if problem.lengths:
        values["lengths"] = np.array([keys - rows if is_after_cache and keys > rows else keys])
    return values


def _compute_mask_states(
    mask: Mask | Formula | None, i: np.ndarray, j: np.ndarray, scalars: Mapping[str, int]
) -> np.ndarray:
    """Return the states of pairs by the mask alone; broadcasts to [rows, keys]."""
    if mask is None:
        return np.array(ALWAYS)
    if isinstance(mask, Mask):
        return np.array(BY_DATA)
    zero = np.zeros((1, 1), np.int64)
    low, high = _BoundsEvaluator({"b": zero, "h": zero, "i": i, "j": j}, scalars).evaluate_bounds(mask.value)
    selects = mask.dtype == "bool"
    always, sometimes = (low, high) if selects else (low > HIDDEN_BIAS, high > HIDDEN_BIAS)
    if mask.short:
        inside = j < scalars.get("mask_keys", 0)
        always, sometimes = always & inside, sometimes & (inside | ("mask_keys" not in scalars))
    seen = np.where(np.logical_or(selects, (low == 0) & (high == 0)), ALWAYS, CHANGED)
    return np.where(always, seen, np.where(sometimes, BY_DATA, NEVER))


class _BoundsEvaluator:
    """The interval of each element of an expression, for tables of any contents."""

    def __init__(self, point: Mapping[str, np.ndarray], scalars: Mapping[str, int]) -> None:
        self.point, self.scalars = point, scalars

    def evaluate_bounds(self, expr: Expr) -> Interval:
        if self._is_static(expr):
            value = evaluate.evaluate(expr, self.point, self.scalars)
            return (value, value) if expr.dtype == "bool" else (value.astype(np.float64), value.astype(np.float64))
        if expr.op == "select":
            condition, yes, no = map(self.evaluate_bounds, expr.args)
            always, sometimes = condition
            merge = (np.logical_and, np.logical_or) if expr.dtype == "bool" else (np.minimum, np.maximum)
            low, high = (
                np.where(always, a, np.where(sometimes, combine(a, b), b)) for combine, a, b in zip(merge, yes, no)
            )
            return low, high
        if expr.op == "sum":
            bounded_terms = [(factor, self.evaluate_bounds(term)) for factor, term in split_terms(expr)]
            ends = [(f * a, f * b) if f > 0 else (f * b, f * a) for f, (a, b) in bounded_terms]
            return functools.reduce(_add, ends)
        if expr.op == "cast":
            return _cast_bounds(self.evaluate_bounds(expr.args[0]), expr.dtype)
        rule = _RULES.get(expr.op)
        if rule is None:
            return _ANY if expr.dtype != "bool" else (np.array(False), np.array(True))
        return rule(*map(self.evaluate_bounds, expr.args))

    def _is_static(self, expr: Expr) -> bool:
        return not any(
            node.op == "load" or (node.op == "scalar" and node.name not in self.scalars) for node in expr.walk()
        )


_ANY = np.array(-np.inf), np.array(np.inf)


def _replace_nan(low: np.ndarray, high: np.ndarray) -> Interval:
    """Return an interval with unbounded ends for those that are infinity minus infinity."""
    return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


def _add(a: Interval, b: Interval) -> Interval:
    return _replace_nan(a[0] + b[0], a[1] + b[1])


def _cast_bounds(value: Interval, dtype: str) -> Interval:
    low, high = value
    if dtype == "bool":
        return (low > 0) | (high < 0), (low != 0) | (high != 0)
    return low.astype(np.float64), high.astype(np.float64)


def _compare_equal(a: Interval, b: Interval) -> Interval:
    always = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return always, (a[0] <= b[1]) & (b[0] <= a[1])


def _negate(a: Interval) -> Interval:
    return ~a[1], ~a[0]


_RULES: dict[str, Callable[..., Interval]] = {
    "and": lambda a, b: (a[0] & b[0], a[1] & b[1]),
    "or": lambda a, b: (a[0] | b[0], a[1] | b[1]),
    "not": _negate,
    "add": _add,
    "sub": lambda a, b: _replace_nan(a[0] - b[1], a[1] - b[0]),
    "min": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
    "max": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "lt": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "le": lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    "eq": _compare_equal,
    "ne": lambda a, b: _negate(_compare_equal(a, b)),
}
