"""What an attention problem means, in float64 NumPy: the oracle of the tests. No kernel shares code with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .expr.evaluate import evaluate
from .formula import Formula
from .problem import AttentionProblem, Mask


def reference(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    past: int = 0,
    sink: np.ndarray | None = None,
    **formula: np.ndarray | int,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Y in the layout of q, and the qk matrix [B, Hq, S, T] if qk_mode asks for it, both float64.

    Inputs have the shapes of the problem's parameters and any real types; those of a formula come by name, or its
    elements as a mask tensor. Masked scores and values are dropped by selection: NaN there does not reach Y. A row
    whose scores are all masked or -inf gives 0.
    """
    raw, capped, masked, bias = _scores(problem, q, k, mask, lengths, past, formula)
    v = np.repeat(_heads_first(v, problem.kv_layout, problem.kv_heads), problem.group, axis=1)
    extra = _extra(problem, sink)
    with np.errstate(all="ignore"):  # masked rows may hold anything
        m = np.maximum(masked.max(axis=-1, keepdims=True, initial=-np.inf), extra)
        m = np.where(m == -np.inf, 0, m)
        p = np.exp(masked - m)
        l = p.sum(axis=-1, keepdims=True) + np.exp(extra - m)
        p = np.where(l == 0, 0, p / l)
        # One term per key, as 0 * NaN = NaN would spoil a matrix product.
        y = np.zeros((*raw.shape[:-1], v.shape[-1]))
        for j in range(v.shape[2]):
            term = p[..., j, None] * v[:, :, None, j, :]
            y += np.where((bias[..., j, None] == -np.inf) | (l == 0), 0, term)
    if problem.q_layout == "bshd":
        y = y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], problem.q_heads * problem.v_head_dim)
    return y, None if problem.qk_mode is None else (raw, capped, masked, p)[problem.qk_mode]


def log_sum_exp(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    mask: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    past: int = 0,
    sink: np.ndarray | None = None,
    **formula: np.ndarray | int,
) -> np.ndarray:
    """The lse output [B, Hq, S] in float64, for inputs as in `reference`."""
    _, _, masked, _ = _scores(problem, q, k, mask, lengths, past, formula)
    sinks = np.broadcast_to(_extra(problem, sink), (*masked.shape[:-1], 1))
    with np.errstate(all="ignore"):
        return np.logaddexp.reduce(np.concatenate([masked, sinks], axis=-1), axis=-1)


def _scores(
    problem: AttentionProblem,
    q: np.ndarray,
    k: np.ndarray,
    mask: np.ndarray | None,
    lengths: np.ndarray | None,
    past: int,
    formula: Mapping[str, np.ndarray | int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[B, Hq, S, T]: scaled scores, those after the soft cap, those after masking, and what masking added."""
    q = _heads_first(q, problem.q_layout, problem.q_heads)
    k = np.repeat(_heads_first(k, problem.kv_layout, problem.kv_heads), problem.group, axis=1)
    with np.errstate(all="ignore"):
        raw = problem.scale * (q @ k.swapaxes(-1, -2))
        capped = problem.softcap * np.tanh(raw / problem.softcap) if problem.softcap else raw
        if mask is None and isinstance(problem.mask, Formula):
            mask = _elements(problem, raw.shape, formula)
        bias = _bias(problem, raw.shape, mask, lengths, past)
        return raw, capped, np.where(bias == -np.inf, -np.inf, capped + bias), bias


def _extra(problem: AttentionProblem, sink: np.ndarray | None) -> np.ndarray:
    """The score of the sink per query head, [Hq, 1, 1]; -inf without one."""
    return np.full((problem.q_heads, 1, 1), -np.inf) if sink is None else sink.astype(np.float64)[:, None, None]


def _heads_first(x: np.ndarray, layout: str, heads: int) -> np.ndarray:
    x = x.astype(np.float64)
    if layout == "bhsd":
        return x
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def _elements(problem: AttentionProblem, shape: tuple[int, ...], given: Mapping[str, np.ndarray | int]) -> np.ndarray:
    """The elements of a formula as a mask tensor [B, Hq, S, T]."""
    formula = problem.mask
    assert isinstance(formula, Formula)
    b, h, i, j = np.ogrid[tuple(slice(n) for n in shape)]
    values = evaluate(formula.value, {"b": b, "h": h, "i": i, "j": j}, given)
    hidden = j >= given.get("mask_keys", shape[3])
    return np.broadcast_to(np.where(hidden, False if values.dtype == bool else -np.inf, values), shape)


def _bias(
    problem: AttentionProblem,
    shape: tuple[int, ...],
    mask: np.ndarray | None,
    lengths: np.ndarray | None,
    past: int,
) -> np.ndarray:
    """Everything that is added after the soft cap, as [B, Hq, S, T]: the mask, and -inf where a key is hidden."""
    batch, _, rows, keys = shape
    bias = np.zeros(shape)
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    if mask is not None:
        values = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
        if isinstance(problem.mask, Mask) and problem.mask.pad:
            missing = max(0, keys - values.shape[-1])
            values = np.pad(values, [(0, 0)] * 3 + [(0, missing)], constant_values=-np.inf)[..., :keys]
        bias = bias + values
    for b in range(batch):
        hidden = np.zeros((rows, keys), bool)
        if lengths is not None:
            hidden |= j >= lengths[b]
        if problem.window is not None:
            offset = past if problem.window.offset == "past" else 0
            if problem.window.offset == "lengths":
                assert lengths is not None
                offset = int(lengths[b]) - rows
            if problem.window.left is not None:
                hidden |= j < i + offset - problem.window.left
            if problem.window.right is not None:
                hidden |= j > i + offset + problem.window.right
        bias[b][:, hidden] = -np.inf
    return bias
