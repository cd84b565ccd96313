"""The inputs of the operator GptAttention for a call of the function, whose arguments have more forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..ops.tensorrt_llm.gpt_attention import INPUTS


def collect_inputs(qkv: Any, requested: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the node's inputs; arguments that locate a layer are converted to layer 0 in its own pool."""
    projections = [np.asarray(projection) for projection in qkv] if isinstance(qkv, (list, tuple)) else None
    inputs = {"qkv": np.asarray(qkv) if projections is None else np.concatenate(projections, axis=-1)}
    layer, pools = requested["layer_idx"], requested["host_kv_cache_pool_pointers"]
    for name in INPUTS[1:]:
        if requested[name] is not None:
            inputs[name] = requested[name]
    cache = inputs.pop("past_key_value", None)
    pools = [cache] if pools is None and cache is not None and not isinstance(cache, (list, tuple)) else pools
    pools = cache if pools is None else pools
    mapping = np.asarray(inputs["host_kv_cache_pool_mapping"]) if "host_kv_cache_pool_mapping" in inputs else None
    if pools is not None:
        pool_index, layer_index = (0, layer) if mapping is None else (int(mapping[layer, 0]), int(mapping[layer, 1]))
        inputs["past_key_value"] = pools[pool_index]
        if inputs["past_key_value"].ndim == 6:
            inputs["host_kv_cache_pool_mapping"] = np.array([[0, layer_index]], np.int32)
        else:
            inputs.pop("host_kv_cache_pool_mapping", None)
        offsets = inputs.get("kv_cache_block_offsets")
        if offsets is not None and np.ndim(offsets) == 5:
            inputs["kv_cache_block_offsets"] = np.asarray(offsets)[pool_index]
    windows = inputs.get("host_max_attention_window_sizes")
    if windows is not None:
        inputs["host_max_attention_window_sizes"] = np.asarray(windows)[layer % len(windows) :][:1]
    for name in ("rotary_cos_sin", "long_rope_rotary_cos_sin"):
        if name in inputs:
            inputs[name] = np.asarray(inputs[name]).reshape(-1, requested["rotary_embedding_dim"] // 2, 2)
    for name, value in inputs.items():
        if name != "past_key_value":
            array = np.asarray(value)
            inputs[name] = array.reshape(-1) if name == "host_sink_token_length" else array
    if "host_sink_token_length" in inputs:
        inputs["host_sink_token_length"] = inputs["host_sink_token_length"].astype(np.int32)
    return inputs
