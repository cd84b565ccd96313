"""com.microsoft PagedAttention in float64, written from its documentation; none of the compiler's code is used.

Codes are computed in float32, as the operator does, so that caches compare bit for bit where nothing is rotated.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]


def paged_attention(given: Arrays, attributes: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The output in float64, NaN in rows of no sequence, and the caches after the call."""
    heads, kv_heads = attributes["num_heads"], attributes["kv_num_heads"]
    q, k, v = _rows(given, heads, kv_heads)
    tokens, size = q.shape[0], q.shape[2]
    dtype = given["query"].dtype
    key_cache = given["key_cache"].copy()
    value_cache = given["value_cache"].copy() if "value_cache" in given else None
    blocks, block = key_cache.shape[:2]
    if "q_norm_weight" in given:
        epsilon = attributes.get("qk_norm_epsilon", 1e-6)
        q, k = (_normalized(x, given[f"{n}_norm_weight"], epsilon, dtype) for x, n in ((q, "q"), (k, "k")))
    table, ends = given["block_table"], given["cumulative_sequence_length"]
    sequences = []
    for b, past in enumerate(given["past_seqlens"].tolist()):
        first, last = (min(max(int(x), 0), tokens) for x in ends[b : b + 2])
        legal = past >= 0 and past + last - first <= (table.shape[1] * block if blocks else 0)
        sequences.append((b, first, last, past, legal))
    for _, first, last, past, legal in sequences:
        for n in range(first, last) if attributes.get("do_rotary") and legal else ():
            q[n], k[n] = (_turned(x[n], given, past + n - first, attributes, dtype) for x in (q, k))
    for b, first, last, past, legal in sequences:
        for n in range(first, last) if legal else ():
            slot = _slot(table[b], past + n - first, block, blocks)
            if "slot_mapping" in given:
                number = int(given["slot_mapping"][n])
                slot = divmod(number, block) if 0 <= number < blocks * block else None
            if slot is not None:
                key_cache[slot] = coded(k[n], given.get("k_scale"), key_cache.dtype)
                if value_cache is not None and v is not None:
                    value_cache[slot] = coded(v[n], given.get("v_scale"), value_cache.dtype)
    v_size = attributes.get("v_head_size") or size
    y = np.full((tokens, heads, v_size), np.nan)
    scale = attributes.get("scale") or size**-0.5
    for b, first, last, past, legal in sequences:
        y[first:last] = 0
        keys = [t for t in range(past + last - first) if _slot(table[b], t, block, blocks)] if legal else []
        places = [_slot(table[b], t, block, blocks) for t in keys]
        k_all = [numbers(key_cache[place], given.get("k_scale")) for place in places if place]
        v_all = k_all if value_cache is None else [
            numbers(value_cache[place], given.get("v_scale")) for place in places if place
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
                sink = float(given["head_sink"][h]) if "head_sink" in given else -np.inf
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                weights /= weights.sum() + np.exp(sink - top)
                y[n, h] = sum(w * v_all[j][at][:v_size] for w, j in zip(weights, seen))
    return y.reshape(tokens, heads * v_size), key_cache, value_cache


def _rows(given: Arrays, heads: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Copies [N, heads, D]; no values of a latent cache."""
    query = given["query"]
    tokens = query.shape[0]
    if "key" in given:
        parts = [query, given["key"], given.get("value")]
    else:
        size = query.shape[1] // (heads + 2 * kv_heads)
        parts = np.split(query, [heads * size, (heads + kv_heads) * size], axis=1)
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (None if x is None else x.reshape(tokens, n, x.shape[1] // n).copy() for x, n in zip(parts, counts))
    assert q is not None and k is not None
    return q, k, v


def _normalized(x: np.ndarray, weight: np.ndarray, epsilon: float, dtype: Any) -> np.ndarray:
    wide = x.astype(np.float64)
    mean = (wide**2).mean(-1, keepdims=True)
    return (wide / np.sqrt(mean + epsilon) * weight.astype(np.float64)).astype(dtype)


def _turned(x: np.ndarray, given: Arrays, position: int, attributes: dict[str, Any], dtype: Any) -> np.ndarray:
    cos, sin = (given[f"{name}_cache"][position].astype(np.float64) for name in ("cos", "sin"))
    first, half = attributes.get("rotary_offset", 0), len(cos)
    y = x.astype(np.float64)
    if attributes.get("rotary_interleaved"):
        one, other = slice(first, first + 2 * half, 2), slice(first + 1, first + 2 * half, 2)
    else:
        one, other = slice(first, first + half), slice(first + half, first + 2 * half)
    a, b = y[:, one].copy(), y[:, other].copy()
    y[:, one], y[:, other] = a * cos - b * sin, b * cos + a * sin
    return y.astype(dtype)


def _slot(row: np.ndarray, t: int, block: int, blocks: int) -> tuple[int, int] | None:
    """Block and place of token t, None where the table has none."""
    if t // block >= len(row) or not 0 <= row[t // block] < blocks:
        return None
    return int(row[t // block]), t % block


def coded(x: np.ndarray, scale: np.ndarray | None, dtype: Any) -> np.ndarray:
    """Rows [heads, D] as a cache holds them."""
    if scale is None:
        return x.astype(dtype)
    scale = scale.reshape(x.shape) if scale.size > 1 else scale.reshape(())
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)
    value = x.astype(np.float32) * inverse
    if dtype == np.int8:
        return np.clip(np.rint(value), -128, 127).astype(np.int8)
    return np.clip(value, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def numbers(codes: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    """What rows [heads, D] of a cache mean."""
    x = codes.astype(np.float64)
    if scale is None:
        return x
    return x * (scale.reshape(x.shape) if scale.size > 1 else scale.reshape(())).astype(np.float64)
