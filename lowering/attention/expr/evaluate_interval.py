"""Interval analysis in NumPy, element by element, for tables of any contents and scalars of which some are unknown."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from .evaluate import FUNCTIONS, evaluate
from .interval import Interval, IntervalAnalysis
from .node import Expr


def evaluate_interval(expr: Expr, point: Mapping[str, np.ndarray], scalars: Mapping[str, int]) -> Interval:
    """Return the interval of the expression at arrays of indices by name, which broadcast; numbers are float64."""
    with np.errstate(all="ignore"):
        interval = _EvaluatedAnalysis(point, scalars).analyze(expr)
    assert interval is not None
    return interval


class _EvaluatedAnalysis(IntervalAnalysis):
    ops: ClassVar[Mapping[str, Callable[..., Any]]] = FUNCTIONS | {
        "all": lambda *ends: functools.reduce(np.logical_and, ends),
        "any": lambda *ends: functools.reduce(np.logical_or, ends),
        "floordiv": lambda a, b: np.floor(a / b),  # np.floor_divide of infinity is NaN
    }

    def __init__(self, point: Mapping[str, np.ndarray], scalars: Mapping[str, int]) -> None:
        super().__init__()
        self.point, self.scalars = point, scalars

    def compute(self, expr: Expr) -> Interval | None:
        if all(node.op != "load" and (node.op != "scalar" or node.name in self.scalars) for node in expr.walk()):
            value = evaluate(expr, self.point, self.scalars)
            value = value if expr.dtype == "bool" else value.astype(np.float64)
            return value, value
        return super().compute(expr)

    def make_constant(self, value: float, dtype: str) -> np.ndarray:
        return np.array(value, bool if dtype == "bool" else np.float64)

    def read_constant(self, end: np.ndarray) -> float | None:
        return float(end) if end.ndim == 0 else None

    def convert(self, end: np.ndarray, dtype: str) -> np.ndarray:
        return np.trunc(end.astype(np.float64)) if "int" in dtype else end.astype(np.float64)

    def replace_nan(self, end: np.ndarray, replacement: float) -> np.ndarray:
        return np.where(np.isnan(end), replacement, end)

    def read_leaf(self, expr: Expr) -> Interval | None:
        return None

    def read_table(self, expr: Expr, positions: Sequence[Interval]) -> Interval | None:
        return None

    def make_unknown(self, dtype: str) -> Interval | None:
        return super().make_unknown(dtype) or (np.array(-np.inf), np.array(np.inf))
