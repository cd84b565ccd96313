"""The masks of gpt_attention and the terms that it adds to scores, written from the description alone."""

from __future__ import annotations

import math

import numpy as np

from tests.serving.gpt_attention.gpt_cache_reference import Call

MASK_TYPES = (
    "padding", "causal", "sliding_window_causal", "bidirectional", "bidirectionalglm", "blocksparse", "custom_mask",
)  # fmt: skip


def unpack_mask(call: Call) -> np.ndarray:
    """Return bool (rows, keys) of attention_mask or of the bits of attention_packed_mask."""
    if call.attention_mask is not None:
        return np.asarray(call.attention_mask)
    assert call.attention_packed_mask is not None
    lanes = np.asarray(call.attention_packed_mask).astype(np.int64) & 0xFFFFFFFF
    bits = (lanes[:, :, None] >> np.arange(32)) & 1
    return bits.reshape(len(lanes), -1).astype(bool)


def compute_slopes(heads: int) -> np.ndarray:
    """Return ALiBi's slopes float64 (heads): a geometric series, then odd powers of its half ratio."""
    closest = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8 * (h + 1) / closest) for h in range(closest)]
    slopes += [2.0 ** (-4 * (2 * k + 1) / closest) for k in range(heads - closest)]
    return np.array(slopes, np.float64)


def find_bucket(relative: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Return the bucket of a distance j - p; logarithms in float32."""
    base, distance = 0, max(-relative, 0)
    if bidirectional:
        buckets //= 2
        base, distance = (buckets if relative > 0 else 0), abs(relative)
    exact = buckets // 2
    if distance < exact:
        return base + distance
    fraction = np.log(np.float32(distance) / np.float32(exact)) / np.log(np.float32(max_distance) / np.float32(exact))
    return base + min(exact + int(np.trunc(fraction * np.float32(buckets - exact))), buckets - 1)
