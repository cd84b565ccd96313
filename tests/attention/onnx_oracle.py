"""ONNX Attention straight from the standard's formula, in float64, without the compiler's code.

onnx's own evaluator cannot serve. That of onnx 1.23 returns capped scores in mode 0, aligns causal masks wrongly where
attn_mask has one row, refuses causal masks of rank 1, and broadcasts illegal head counts and batches.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def attention(
    version: int,
    attributes: dict[str, Any],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray | None = None,
    past_key: np.ndarray | None = None,
    past_value: np.ndarray | None = None,
    nonpad: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return Y, present_key, present_value, and qk_matmul_output, in the types that the operator gives them."""
    flat, dtype = q.ndim == 3, q.dtype
    if flat:
        q = _split(q, attributes["q_num_heads"])
        k, v = (_split(x, attributes["kv_num_heads"]) for x in (k, v))
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = np.concatenate([past_key, k], axis=2), np.concatenate([past_value, v], axis=2)
    present_key, present_value = k, v
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float64) for x in (q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)))
    batch, heads, rows, head_dim = q.shape
    keys = k.shape[2]
    scores = q @ k.swapaxes(-1, -2) * attributes.get("scale", head_dim**-0.5)
    cap = attributes.get("softcap", 0.0)
    capped = cap * np.tanh(scores / cap) if cap else scores

    bias = np.zeros((batch, heads, rows, keys))
    if mask is not None:
        terms = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(dtype).astype(np.float64)
        if version >= 24 and terms.shape[-1] < keys:
            missing = np.full((*terms.shape[:-1], keys - terms.shape[-1]), -np.inf)
            terms = np.concatenate([terms, missing], axis=-1)
        bias += terms
    valid = np.full(batch, keys) if nonpad is None else nonpad
    offset = np.full(batch, past) if nonpad is None else nonpad - rows
    position = (np.arange(rows)[None, :] + offset[:, None])[:, None, :, None]
    key = np.arange(keys)[None, None, None, :]
    left, right = (min(attributes.get(f"{side}_window_size", -1), 2**40) for side in ("left", "right"))
    hidden = key >= valid[:, None, None, None]
    if attributes.get("is_causal", 0):
        hidden = hidden | (key > position)
    if left >= 0:
        hidden = hidden | (key < position - left)
    if right >= 0:
        hidden = hidden | (key > position + right)
    bias = np.where(hidden, -np.inf, bias)

    biased = np.where(bias == -np.inf, -np.inf, capped + bias)
    top = biased.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(biased - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    y = np.where(weights[..., None] > 0, weights[..., None] * v[:, :, None], 0.0).sum(axis=3)
    if flat:
        y = y.swapaxes(1, 2).reshape(batch, rows, heads * v.shape[-1])
    qk = (scores, capped, biased, weights)[attributes.get("qk_matmul_output_mode", 0)]
    return y.astype(dtype), present_key, present_value, qk.astype(dtype)


def _split(x: np.ndarray, heads: int) -> np.ndarray:
    """Reshape [B, L, H * D] to [B, H, L, D]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).swapaxes(1, 2)
