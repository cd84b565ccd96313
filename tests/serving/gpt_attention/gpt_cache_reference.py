"""The arguments and caches of gpt_attention, written from the description alone: slots, blocks, rings, 8 bit values.

A cache is copied on entry, so that reads see it as it was before the call and the caller's arrays stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
INT8_MODE, FP8_MODE = 64, 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of one call, under the names of TensorRT-LLM."""

    qkv: Any
    num_heads: int
    hidden_size_per_head: int
    past_key_value: Any = None
    attention_mask: np.ndarray | None = None
    attention_packed_mask: np.ndarray | None = None
    sequence_length: np.ndarray | None = None
    host_past_key_value_lengths: np.ndarray | None = None
    host_max_attention_window_sizes: np.ndarray | None = None
    host_sink_token_length: Any = None
    context_lengths: np.ndarray | None = None
    cache_indirection: np.ndarray | None = None
    host_request_types: np.ndarray | None = None
    layer_idx: int = 0
    num_kv_heads: int | None = None
    q_scaling: float = 1.0
    attn_logit_softcapping_scale: float = 0.0
    rotary_embedding_dim: int = 0
    rotary_embedding_base: float = 10000.0
    rotary_embedding_scale_type: Any = 0
    rotary_embedding_short_m_scale: float | None = None
    rotary_embedding_long_m_scale: float | None = None
    rotary_embedding_scale: float = 1.0
    rotary_embedding_max_positions: int = 1024
    rotary_embedding_original_max_positions: int = 1024
    rope_scaling_config: Mapping[str, Any] | None = None
    position_embedding_type: Any = 0
    rotary_inv_freq: np.ndarray | None = None
    rotary_cos_sin: np.ndarray | None = None
    long_rope_rotary_inv_freq: np.ndarray | None = None
    long_rope_rotary_cos_sin: np.ndarray | None = None
    kv_orig_quant_scale: np.ndarray | None = None
    kv_quant_orig_scale: np.ndarray | None = None
    attention_output_orig_quant_scale: np.ndarray | None = None
    kv_cache_quant_mode: int = 0
    max_context_length: int | None = None
    mask_type: Any = 1
    block_sparse_block_size: int = 64
    block_sparse_homo_head_pattern: bool = False
    block_sparse_num_local_blocks: int = 16
    block_sparse_vertical_stride: int = 8
    alibi_slopes: np.ndarray | None = None
    tp_size: int = 1
    tp_rank: int = 0
    kv_cache_block_offsets: np.ndarray | None = None
    host_kv_cache_block_offsets: np.ndarray | None = None
    host_kv_cache_pool_pointers: Any = None
    host_kv_cache_pool_mapping: np.ndarray | None = None
    do_cross_attention: bool = False
    cross_kv: np.ndarray | None = None
    cross_kv_length: Any = None
    encoder_input_lengths: np.ndarray | None = None
    relative_attention_bias: np.ndarray | None = None
    max_distance: int = 0
    logn_scaling: np.ndarray | None = None
    host_context_lengths: np.ndarray | None = None
    qkv_bias: np.ndarray | None = None
    use_cache: bool = True
    streamingllm: bool = False
    use_one_more_block: bool = False
    use_fp8_context_fmha: bool = False
    multi_block_mode: Any = None
    attend_current_unquantized: bool = True
    trt_mmha_compat: bool = False
    relative_attention_bidirectional: bool = False
    return_lse: bool = False
    check: bool = True
    target: Any = "cpu"

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def beams(self) -> int:
        return 1 if self.cache_indirection is None else self.cache_indirection.shape[1]

    @property
    def window(self) -> int | None:
        """Return W of this layer; None: every key is within the window."""
        if self.host_max_attention_window_sizes is None:
            return None
        sizes = np.asarray(self.host_max_attention_window_sizes).reshape(-1)
        return int(sizes[self.layer_idx % len(sizes)])

    @property
    def sinks(self) -> int:
        if self.host_sink_token_length is None:
            return 0
        return int(np.asarray(self.host_sink_token_length).reshape(-1)[0])

    @property
    def quantized(self) -> bool:
        return bool(self.use_cache and int(self.kv_cache_quant_mode) & (INT8_MODE | FP8_MODE))


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Convert float32 values to float8_e4m3fn: to nearest, ties to even, beyond +-448 saturated and never NaN."""
    assert values.dtype == np.float32
    return np.clip(values, np.float32(-E4M3_MAX), np.float32(E4M3_MAX)).astype(E4M3)


def quantize(values: np.ndarray, scale: np.float32, dtype: np.dtype) -> np.ndarray:
    """Return sat(rne(float32(values) * scale)), with the multiplication in float32."""
    matmul = values.astype(np.float32) * np.float32(scale)
    if dtype == np.dtype(np.int8):
        return np.clip(np.rint(matmul), -128, 127).astype(np.int8)
    assert dtype == E4M3, dtype
    return to_e4m3(matmul)


def find_slot(call: Call, token: int, block_size: int | None) -> int:
    """Return the slot of a token: sinks first, then, after the bubble, a ring of W - Sk tokens and the spare block's.

    block_size is None for a contiguous cache. Cross attention ignores windows and sinks.
    """
    sinks, window = call.sinks, call.window
    if call.do_cross_attention or token < sinks:
        return token
    bubble = 0 if block_size is None else (-sinks) % block_size
    if window is None:
        return bubble + token
    spare = block_size if block_size is not None and call.use_one_more_block else 0
    return sinks + bubble + (token - sinks) % (window - sinks + spare)


class Cache:
    """A copy of the caches of a call, read and written one token of one (request, beam) at a time.

    `arrays` are the copies: none without a cache, the one contiguous cache, or all pools.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.paged = call.kv_cache_block_offsets is not None
        sources: list[Any] = []
        if call.use_cache and call.past_key_value is not None:
            sources = (
                [*call.past_key_value] if isinstance(call.past_key_value, (list, tuple)) else [call.past_key_value]
            )
        elif call.use_cache and call.host_kv_cache_pool_pointers is not None:
            sources = [*call.host_kv_cache_pool_pointers]
        self.arrays = [np.array(array, copy=True) for array in sources]
        self.layer, pool = 0, 0
        self.block_size: int | None = None
        if self.paged:
            if call.host_kv_cache_pool_mapping is not None:
                pool, self.layer = (int(v) for v in call.host_kv_cache_pool_mapping[call.layer_idx])
            elif self.arrays[0].ndim == 6:
                self.layer = call.layer_idx
            offsets = np.asarray(call.kv_cache_block_offsets)
            self.offsets = offsets[pool] if offsets.ndim == 5 else offsets  # (B, beams, 2, M)
            self.blocks = self.arrays[pool].reshape(-1, *self.arrays[pool].shape[-3:])  # (blocks of K or V, Hkv, Tb, D)
            self.block_size = self.blocks.shape[2]
        self.dtype = self.arrays[pool].dtype if self.arrays else np.dtype(np.float32)
        for name in ("kv_orig_quant_scale", "kv_quant_orig_scale"):
            array = getattr(call, name)
            scales = None
            if call.quantized:
                flat = np.asarray(array, np.float32).reshape(-1)
                scales = (flat[0], flat[-1])  # of K and of V
            setattr(self, name, scales)
        self.kv_orig_quant_scale: tuple[np.float32, np.float32] | None
        self.kv_quant_orig_scale: tuple[np.float32, np.float32] | None

    def view_token(self, request: int, beam: int, which: int, token: int) -> np.ndarray:
        """Return a view (Hkv, D) of K (which = 0) or V (1) of a token."""
        slot = find_slot(self.call, token, self.block_size)
        if self.block_size is None:
            cache = self.arrays[0]
            row = request * self.call.beams + beam
            assert 0 <= row < cache.shape[0] and 0 <= slot < cache.shape[3]
            return cache[row, which, :, slot]
        column = slot // self.block_size
        assert 0 <= column < self.offsets.shape[3]
        entry = int(self.offsets[request, beam, which, column])
        assert entry >= 0 and entry + 2 * self.layer < len(self.blocks), (request, beam, which, column, entry)
        return self.blocks[entry + 2 * self.layer, :, slot % self.block_size]

    def used(self, stored: np.ndarray, which: int) -> np.ndarray:
        """Return float64 of cached values."""
        values = stored.astype(np.float64)
        if self.kv_quant_orig_scale is not None:
            values = values * float(self.kv_quant_orig_scale[which])
        return values

    def quantize(self, values: np.ndarray, which: int) -> np.ndarray:
        """Quantize values of T to the type of the cache."""
        if self.kv_orig_quant_scale is None:
            return values
        return quantize(values, self.kv_orig_quant_scale[which], self.dtype)

    def read(self, request: int, beam: int, which: int, token: int) -> np.ndarray:
        return self.used(self.view_token(request, beam, which, token), which)

    def write(self, request: int, beam: int, which: int, token: int, values: np.ndarray) -> None:
        quantized = self.quantize(values, which)
        assert quantized.dtype == self.dtype
        self.view_token(request, beam, which, token)[...] = quantized
