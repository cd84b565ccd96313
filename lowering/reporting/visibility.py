"""Visible keys of each row, as far as they follow from sizes before a model runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..attention.codegen.scores import HIDDEN_BIAS
from ..attention.expr.evaluate_interval import evaluate_interval
from ..attention.record.formula import Formula
from ..attention.record.problem import AttentionProblem, Mask
from ..attention.reference import find_visible_keys

NEVER, BY_DATA, CHANGED, ALWAYS = range(4)
"""States of a row and a key: hidden; hidden depending on data; visible with a modified score; visible as it is."""


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
    low, high = evaluate_interval(mask.value, {"b": zero, "h": zero, "i": i, "j": j}, scalars)
    selects = mask.dtype == "bool"
    always, sometimes = (low, high) if selects else (low > HIDDEN_BIAS, high > HIDDEN_BIAS)
    if mask.short:
        inside = j < scalars.get("mask_keys", 0)
        always, sometimes = always & inside, sometimes & (inside | ("mask_keys" not in scalars))
    seen = np.where(np.logical_or(selects, (low == 0) & (high == 0)), ALWAYS, CHANGED)
    return np.where(always, seen, np.where(sometimes, BY_DATA, NEVER))
