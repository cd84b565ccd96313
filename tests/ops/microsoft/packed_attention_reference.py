"""com.microsoft PackedMultiHeadAttention in float64, sequence by sequence, from the operator's documentation."""

from __future__ import annotations

import itertools

import numpy as np


def packed_attention(inputs: dict[str, np.ndarray], heads: int, scale: float = 0.0) -> np.ndarray:
    """Return the output [T, Hv]; rows without a sequence are 0."""
    query = inputs["query"].astype(np.float64)
    if query.ndim == 4:
        rows = [query[:, :, n].reshape(len(query), -1) for n in range(3)]
    else:
        rows = [inputs[name].astype(np.float64) for name in ("query", "key", "value")]
    if "bias" in inputs:
        edges = np.cumsum([x.shape[1] for x in rows])[:-1]
        rows = [x + bias_slice for x, bias_slice in zip(rows, np.split(inputs["bias"].astype(np.float64), edges))]
    q, k, v = (x.reshape(len(x), heads, x.shape[1] // heads) for x in rows)
    result = np.zeros((len(q), heads, v.shape[2]))
    starts = inputs["cumulative_sequence_length"]
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        scores = np.einsum("ihd,jhd->hij", q[first:last], k[first:last]) * (scale or q.shape[2] ** -0.5)
        if "attention_bias" in inputs:
            bias = inputs["attention_bias"].astype(np.float64)
            scores = scores + bias[b % len(bias), :, : last - first, : last - first]
        if last > first:
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            result[first:last] = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v[first:last])
    return result.reshape(len(q), heads * v.shape[2])
