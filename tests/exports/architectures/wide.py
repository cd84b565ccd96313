"""Sizes of decoders whose speed is measured: four layers as wide as small published models."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "num_hidden_layers": 4, "vocab_size": 8192, "max_position_embeddings": 2048,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}

# By type what else it has.
BY_TYPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 512},
    "gpt_oss": {
        **_EXPERTS, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128,
    },
    "deepseek_v3": {
        **_EXPERTS, "num_key_value_heads": 12, "q_lora_rank": 384, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_value_heads": 12,
        "linear_num_key_heads": 6, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "bamba": {
        "layer_types": ["mamba2"] * 3 + ["full_attention"], "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 64,
    },
    "whisper": {"num_key_value_heads": 12, "num_decoder_layers": 4, "max_target_positions": 1024},
}  # fmt: skip
