"""com.microsoft PagedAttention in float64, written from its documentation; none of the compiler's code is used.

Quantized values are computed in float32, as the operator does. So caches without rotation compare bit for bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]


def paged_attention(inputs: Arrays, attributes: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the output in float64, NaN in rows of no sequence, and the caches after the call."""
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    q, k, v = _split_rows(inputs, heads, kv_heads)
    tokens, size = q.shape[0], q.shape[2]
    dtype = inputs["query"].dtype
    key_cache = inputs["key_cache"].copy()
    value_cache = inputs["value_cache"].copy() if "value_cache" in inputs else None
    blocks, block = key_cache.shape[:2]
    if "q_norm_weight" in inputs:
        epsilon = attributes.get("qk_norm_epsilon", 1e-6)
        q, k = (_normalize(x, inputs[f"{n}_norm_weight"], epsilon, dtype) for x, n in ((q, "q"), (k, "k")))
    table, ends = inputs["block_table"], inputs["cumulative_sequence_length"]
    sequences = []
    for b, past in enumerate(inputs["past_seqlens"].tolist()):
        first, last = (min(max(int(x), 0), tokens) for x in ends[b : b + 2])
        legal = past >= 0 and past + last - first <= (table.shape[1] * block if blocks else 0)
        sequences.append((b, first, last, past, legal))
    for _, first, last, past, legal in sequences:
        for n in range(first, last) if attributes.get("do_rotary") and legal else ():
            q[n], k[n] = (_rotate(x[n], inputs, past + n - first, attributes, dtype) for x in (q, k))
    for b, first, last, past, legal in sequences:
        for n in range(first, last) if legal else ():
            slot = _find_slot(table[b], past + n - first, block, blocks)
            if "slot_mapping" in inputs:
                number = int(inputs["slot_mapping"][n])
                slot = divmod(number, block) if 0 <= number < blocks * block else None
            if slot is not None:
                key_cache[slot] = quantize_rows(k[n], inputs.get("k_scale"), key_cache.dtype)
                if value_cache is not None and v is not None:
                    value_cache[slot] = quantize_rows(v[n], inputs.get("v_scale"), value_cache.dtype)
    v_size = attributes.get("v_head_size") or size
    y = np.full((tokens, heads, v_size), np.nan)
    scale = attributes.get("scale") or size**-0.5
    for b, first, last, past, legal in sequences:
        y[first:last] = 0
        keys = [t for t in range(past + last - first) if _find_slot(table[b], t, block, blocks)] if legal else []
        entries = [_find_slot(table[b], t, block, blocks) for t in keys]
        k_all = [dequantize_rows(key_cache[entry], inputs.get("k_scale")) for entry in entries if entry]
        v_all = k_all if value_cache is None else [
            dequantize_rows(value_cache[entry], inputs.get("v_scale")) for entry in entries if entry
        ]  # fmt: skip
        for n in range(first, last):
            p = past + n - first
            left = attributes.get("local_window_size", -1)
            seen = [
                j for j, t in enumerate(keys)
                if (t <= p or not attributes.get("is_causal", 1)) and (left < 0 or t > p - left)
            ]  # fmt: skip
            if not seen:
                continue
            for h in range(heads):
                at = h // (heads // kv_heads)
                scores = np.array([q[n, h].astype(np.float64) @ k_all[j][at] for j in seen]) * scale
                if attributes.get("softcap"):
                    scores = attributes["softcap"] * np.tanh(scores / attributes["softcap"])
                sink = float(inputs["head_sink"][h]) if "head_sink" in inputs else -np.inf
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                weights /= weights.sum() + np.exp(sink - top)
                y[n, h] = sum(w * v_all[j][at][:v_size] for w, j in zip(weights, seen))
    return y.reshape(tokens, heads * v_size), key_cache, value_cache


def _split_rows(inputs: Arrays, heads: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return copies [N, heads, D]; a latent cache lacks values."""
    query = inputs["query"]
    tokens = query.shape[0]
    if "key" in inputs:
        projections = [query, inputs["key"], inputs.get("value")]
    else:
        size = query.shape[1] // (heads + 2 * kv_heads)
        projections = np.split(query, [heads * size, (heads + kv_heads) * size], axis=1)
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (None if x is None else x.reshape(tokens, n, x.shape[1] // n).copy() for x, n in zip(projections, counts))
    assert q is not None and k is not None
    return q, k, v


def _normalize(x: np.ndarray, weight: np.ndarray, epsilon: float, dtype: Any) -> np.ndarray:
    wide = x.astype(np.float64)
    mean = (wide**2).mean(-1, keepdims=True)
    return (wide / np.sqrt(mean + epsilon) * weight.astype(np.float64)).astype(dtype)


def _rotate(x: np.ndarray, inputs: Arrays, position: int, attributes: dict[str, Any], dtype: Any) -> np.ndarray:
    cos, sin = (inputs[f"{name}_cache"][position].astype(np.float64) for name in ("cos", "sin"))
    offset, half = attributes.get("rotary_offset", 0), len(cos)
    y = x.astype(np.float64)
    if attributes.get("rotary_interleaved"):
        first_half, second_half = slice(offset, offset + 2 * half, 2), slice(offset + 1, offset + 2 * half, 2)
    else:
        first_half, second_half = slice(offset, offset + half), slice(offset + half, offset + 2 * half)
    a, b = y[:, first_half].copy(), y[:, second_half].copy()
    y[:, first_half], y[:, second_half] = a * cos - b * sin, b * cos + a * sin
    return y.astype(dtype)


def _find_slot(row: np.ndarray, t: int, block: int, blocks: int) -> tuple[int, int] | None:
    """Return block and offset of token t, None where the table lacks a legal block."""
    if t // block >= len(row) or not 0 <= row[t // block] < blocks:
        return None
    return int(row[t // block]), t % block


def quantize_rows(x: np.ndarray, scale: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Quantize rows [heads, D] to the type of the cache."""
    if scale is None:
        return x.astype(dtype)
    scale = scale.reshape(x.shape) if scale.size > 1 else scale.reshape(())
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)
    value = x.astype(np.float32) * inverse
    if dtype == np.int8:
        return np.clip(np.rint(value), -128, 127).astype(np.int8)
    return np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def dequantize_rows(quantized: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """Dequantize rows [heads, D] of a cache to float64."""
    x = quantized.astype(np.float64)
    if scale is None:
        return x
    return x * (scale.reshape(x.shape) if scale.size > 1 else scale.reshape(())).astype(np.float64)
