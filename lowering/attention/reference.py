"""What an attention problem means, in float64 NumPy: the oracle of the tests. No kernel shares code with it."""

from __future__ import annotations

import numpy as np

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
) -> tuple[np.ndarray, np.ndarray | None]:
    """Y in the layout of q, and the qk matrix [B, Hq, S, T] if qk_mode asks for it, both float64.

    Inputs have the shapes of the problem's parameters and any real types; the elements of a formula come as a mask
    tensor. Masked scores and values are dropped by
    selection: NaN there does not reach Y. A row whose scores are all masked or -inf gives 0.
    """
    raw, capped, masked, bias = _scores(problem, q, k, mask, lengths, past)
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
) -> np.ndarray:
    """The lse output [B, Hq, S] in float64, for inputs as in `reference`."""
    _, _, masked, _ = _scores(problem, q, k, mask, lengths, past)
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
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[B, Hq, S, T]: scaled scores, those after the soft cap, those after masking, and what masking added."""
    q = _heads_first(q, problem.q_layout, problem.q_heads)
    k = np.repeat(_heads_first(k, problem.kv_layout, problem.kv_heads), problem.group, axis=1)
    with np.errstate(all="ignore"):
        raw = problem.scale * (q @ k.swapaxes(-1, -2))
        capped = problem.softcap * np.tanh(raw / problem.softcap) if problem.softcap else raw
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
