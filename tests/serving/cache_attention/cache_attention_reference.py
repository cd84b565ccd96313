"""PPL's KeyValueCache, MultiHeadAttention and MultiHeadCacheAttention of ragged batches, written from their semantics.

None of the compiler's code is used. Quantized values and scales of an int8 cache are computed in the types that the
operators name, so that they compare bit for bit; attention is computed in float64. Source:
docs/operators/dynamic_batching and docs/appendix/KeyValueCacheQuantization.md of openppl-public/ppl.pmx. Its torch
functions differ: here MultiHeadAttention adds ALiBi too with is_alibi, slopes are float32, rows without keys give 0.

In the shapes below B is the requests, N and NK are all their rows and keys, D is head_dim, MaxT is the slots for tokens
in the cache, MaxP is the pages in a row of the page table, and M is at least NK.
"""

from __future__ import annotations

import numpy as np


def key_value_cache(
    current_key: np.ndarray,
    current_value: np.ndarray,
    seqstarts: np.ndarray,
    kvstarts: np.ndarray,
    cachestarts: np.ndarray,
    start_pos: np.ndarray,
    max_seqlen: np.ndarray,
    max_kvlen: np.ndarray,
    cache: np.ndarray,
    scale: np.ndarray | None = None,
    *,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    num_repeat: int = 1,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return KeyValueCache's key and value [NK, heads * num_repeat, D] in current_key's type, new cache and scale.

    current_key and current_value: [N, heads, D]. seqstarts, kvstarts: [B + 1]. cachestarts: [B], or [B, MaxP] with
    pages (cache_mode 1); it and start_pos, [B], count tokens. cache: [MaxT, num_layer, 2, heads, D] in layout 0,
    [num_layer, MaxT, 2, heads, D] in 1, [num_layer, 2, MaxT, heads, D] in 2, [num_layer, 2, heads, MaxT, D] in 3.
    scale: likewise, with D / quant_group for D; without quant_bit it is not used. Every request's tokens are written
    before any are read.
    """
    heads, head_dim = current_key.shape[1:]
    assert quant_bit in (0, 8) and 0 <= layer_idx < num_layer
    axes = {0: "plkh", 1: "lpkh", 2: "lkph", 3: "lkhp"}[cache_layout]
    max_t = cache.shape[axes.index("p")]
    sizes = {"p": max_t, "l": num_layer, "k": 2, "h": heads}
    assert cache.shape == (*(sizes[axis] for axis in axes), head_dim)
    cache = cache.copy()
    scale = None if scale is None else scale.copy()
    scales = scale if quant_bit else None
    assert quant_bit == 0 or (scales is not None and scales.shape == (*cache.shape[:-1], head_dim // quant_group))

    def locate(kind: int, head: int, request: int, position: int) -> tuple[int, ...]:
        """Return the cache index of a head of a token: kind is 0 for its key, 1 for its value."""
        if cache_mode == 0:
            slot = int(cachestarts[request]) + position
        else:
            slot = int(cachestarts[request, position // page_size]) + position % page_size
        assert 0 <= slot < max_t  # NumPy would count a negative index from the end
        where = {"p": slot, "l": layer_idx, "k": kind, "h": head}
        return tuple(where[axis] for axis in axes)

    for b, past in enumerate(start_pos.tolist()):
        rows = int(seqstarts[b + 1] - seqstarts[b])
        assert past + rows == kvstarts[b + 1] - kvstarts[b]
        for kind, current in enumerate((current_key, current_value)):
            for n, h in np.ndindex(rows, heads):
                x, index = current[seqstarts[b] + n, h], locate(kind, h, b, past + n)
                if scales is None:
                    cache[index] = x
                else:
                    cache[index], scales[index] = quantize(x, quant_group)

    shape = (int(kvstarts[-1]), heads, head_dim)
    packed = np.zeros(shape, current_key.dtype), np.zeros(shape, current_key.dtype)
    for b in range(len(start_pos)):
        for kind, to in enumerate(packed):
            for t, h in np.ndindex(int(kvstarts[b + 1] - kvstarts[b]), heads):
                index = locate(kind, h, b, t)
                to[kvstarts[b] + t, h] = cache[index] if scales is None else dequantize(cache[index], scales[index])
    key, value = (np.repeat(x, num_repeat, axis=1) for x in packed)
    return key, value, cache, scale


def quantize(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize x, [D], to int8 in -127 to 127; return it and scales [D / group]. All arithmetic is in x's type."""
    groups = x.reshape(-1, group)
    steps, floor = np.array(127, x.dtype), np.array(1e-5, x.dtype)
    scales = np.maximum(abs(groups).max(axis=1) / steps, floor)
    quantized = np.rint(groups / scales[:, None]).clip(-127, 127)
    assert quantized.dtype == scales.dtype == x.dtype
    return quantized.astype(np.int8).reshape(x.shape), scales


def dequantize(quantized: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return quantized values [D] times their scales [D / group], rounded to the scales' type."""
    groups = quantized.reshape(len(scales), -1).astype(scales.dtype)
    return (groups * scales[:, None]).reshape(quantized.shape)


def multi_head_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    seqstarts: np.ndarray,
    kvstarts: np.ndarray,
    decoding_batches: np.ndarray,
    max_seqlen: np.ndarray,
    max_kvlen: np.ndarray,
    attn_mask: np.ndarray | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: int = 1,
    is_alibi: int = 0,
    num_kv_heads: int = 0,
) -> np.ndarray:
    """Return MultiHeadAttention of a ragged batch: [N, num_heads, D], float64.

    query: [N, num_heads, D]. key and value: [NK, num_kv_heads, D], all heads if num_kv_heads is 0. seqstarts, kvstarts:
    [B + 1]. The first decoding_batches requests lack a causal mask. attn_mask: [N, M] or [num_heads, N, M] to add, of
    which a request reads its own rows and keys; without elements it counts as absent.
    """
    kv_heads = num_kv_heads or num_heads
    assert num_heads % kv_heads == 0 and query.shape[1:] == (num_heads, head_dim)
    assert key.shape == value.shape == (kvstarts[-1], kv_heads, head_dim)
    if attn_mask is not None and not attn_mask.size:
        attn_mask = None
    slopes = compute_alibi_slopes(num_heads).astype(np.float64)
    output = np.zeros(query.shape)
    for b in range(len(seqstarts) - 1):
        own = slice(int(seqstarts[b]), int(seqstarts[b + 1]))
        seen = slice(int(kvstarts[b]), int(kvstarts[b + 1]))
        rows, keys = own.stop - own.start, seen.stop - seen.start
        # of a key relative to the row's own token: negative before it, positive after it
        distance = np.arange(keys)[None, :] - np.arange(rows)[:, None] - (keys - rows)
        causal = is_causal and rows > 1 and b >= int(decoding_batches.item())
        for h in range(num_heads):
            q = query[own, h].astype(np.float64)
            k, v = (x[seen, h // (num_heads // kv_heads)].astype(np.float64) for x in (key, value))
            scores = q @ k.T / np.sqrt(head_dim)
            if attn_mask is not None:
                scores = scores + (attn_mask if attn_mask.ndim == 2 else attn_mask[h])[own, seen].astype(np.float64)
            if is_alibi:
                scores = scores + slopes[h] * distance
            if is_alibi or causal:
                scores = np.where(distance > 0, -np.inf, scores)
            output[own, h] = _softmax(scores) @ v
    return output


def compute_alibi_slopes(heads: int) -> np.ndarray:
    """Return ALiBi's factor of each head, float32: of a power of two of heads, then of every other of twice as many."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    more = [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return np.array(first + more, np.float32)


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of [rows, keys] over the keys; 0 in rows where all scores are -inf."""
    largest = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    total = weights.sum(axis=1, keepdims=True)
    return weights / np.where(total == 0, 1, total)


def multi_head_cache_attention(
    query: np.ndarray,
    current_key: np.ndarray,
    current_value: np.ndarray,
    seqstarts: np.ndarray,
    kvstarts: np.ndarray,
    cachestarts: np.ndarray,
    start_pos: np.ndarray,
    decoding_batches: np.ndarray,
    max_seqlen: np.ndarray,
    max_kvlen: np.ndarray,
    cache: np.ndarray,
    scale: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
    *,
    num_heads: int,
    head_dim: int,
    is_causal: int = 1,
    is_alibi: int = 0,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return MultiHeadCacheAttention's output, [N, num_heads, D] in float64, and new cache and scale.

    Its rows attend to the keys and values that key_value_cache reads back, so to current ones as rounded by the cache.
    Shapes are those of key_value_cache, whose heads are num_kv_heads, and of multi_head_attention.
    """
    key, value, cache, scale = key_value_cache(
        current_key,
        current_value,
        seqstarts,
        kvstarts,
        cachestarts,
        start_pos,
        max_seqlen,
        max_kvlen,
        cache,
        scale,
        num_layer=num_layer,
        layer_idx=layer_idx,
        quant_bit=quant_bit,
        quant_group=quant_group,
        cache_mode=cache_mode,
        cache_layout=cache_layout,
        page_size=page_size,
    )
    output = multi_head_attention(
        query,
        key,
        value,
        seqstarts,
        kvstarts,
        decoding_batches,
        max_seqlen,
        max_kvlen,
        attn_mask,
        num_heads=num_heads,
        head_dim=head_dim,
        is_causal=is_causal,
        is_alibi=is_alibi,
        num_kv_heads=num_kv_heads,
    )
    return output, cache, scale
