"""Small sizes of decoders: what differs from SIZES, by class of the exporter or by registered name."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 2, "vocab_size": 40, "max_position_embeddings": 48, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_type": "default", "rope_theta": 1e4, "pad_token_id": 0,
}  # fmt: skip

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 16}
DELTA_LAYERS = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
GEMMA3 = {
    "attn_qk_norm": True, "rope_local_base_freq": 1e4, "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
}  # fmt: skip
GEMMA4 = {
    **GEMMA3, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8, "global_rope_theta": 1e4,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA4_UNIFIED = {
    **GEMMA4, "hidden_act": "gelu_pytorch_tanh", "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision", "tie_word_embeddings": True,
}  # fmt: skip
LONG_ROPE = {
    "partial_rotary_factor": 0.5, "rope_type": "longrope", "original_max_position_embeddings": 48,
    "rope_scaling": {"short_factor": [1.0], "long_factor": [1.0]},
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
_DEEPSEEK = {
    **EXPERTS, **_MLA, "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "rope_interleave": True,
}  # fmt: skip
_DEEPSEEK_V2 = {**_DEEPSEEK, "scoring_func": "softmax", "topk_method": "group_limited_greedy"}
_EVERY_HEAD = {"num_key_value_heads": 4, "attn_qkv_bias": True, "attn_o_bias": True}
_WHOLE_NORMS = {"attn_qk_norm": True, "attn_qk_norm_full": True}
_STATES = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}

BY_CLASS: dict[str, dict[str, Any]] = {
    "ArceeCausalLMModel": {"hidden_act": "relu2"},
    "BambaCausalLMModel": {"layer_types": ["mamba2", "full_attention"], **_MAMBA},
    "BloomCausalLMModel": {"alibi": True, "mlp_bias": True, **_EVERY_HEAD},
    "CTRLCausalLMModel": {"hidden_act": "relu", "tie_word_embeddings": True, **_EVERY_HEAD},
    "CodeGenCausalLMModel": {
        "partial_rotary_factor": 0.5, "mlp_bias": True, "num_key_value_heads": 4, "hidden_act": "gelu_new",
    },
    "CohereCausalLMModel": {"tie_word_embeddings": True, "logit_scale": 0.0625},
    "DFlashDraftModel": {"target_layer_ids": [0, 1], "block_size": 4, "attn_qk_norm": True, "mask_token_id": 1},
    "DeepSeekV3CausalLMModel": _DEEPSEEK,
    "DeepSeekV4CausalLMModel": {
        **EXPERTS, "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "o_groups": 2,
        "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 4, "index_topk": 2, "compress_ratios": [0, 4],
        "scoring_func": "sqrtsoftplus", "n_shared_experts": 1, "routed_scaling_factor": 1.5, "num_hash_layers": 1,
        "hc_mult": 2, "hc_sinkhorn_iters": 3, "swiglu_limit": 7.0,
    },
    "DogeCausalLMModel": {"num_key_value_heads": 4},
    "Eagle3DraftModel": {"draft_vocab_size": 24, "target_hidden_size": 16, "num_hidden_layers": 1},
    "Ernie45MoECausalLMModel": SHARED_EXPERTS,
    "FalconCausalLMModel": {"parallel_attn": True, "dual_ln": True, "hidden_act": "gelu"},
    "GPT2CausalLMModel": {"hidden_act": "gelu_new", "tie_word_embeddings": True, **_EVERY_HEAD},
    "GPTJCausalLMModel": {
        "partial_rotary_factor": 0.5, "mlp_bias": True, "num_key_value_heads": 4, "hidden_act": "gelu_new",
    },
    "GPTNeoXCausalLMModel": {"partial_rotary_factor": 0.5, "mlp_bias": True, "hidden_act": "gelu", **_EVERY_HEAD},
    "GPTNeoXJapaneseCausalLMModel": {"num_key_value_heads": 4, "attn_o_bias": True, "hidden_act": "gelu"},
    "GPTOSSCausalLMModel": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, **EXPERTS},
    "Gemma2CausalLMModel": {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 4,
    },
    "Gemma3CausalLMModel": GEMMA3,
    "Gemma3nCausalLMModel": {
        **GEMMA3, "hidden_act": "gelu_pytorch_tanh", "altup_num_inputs": 2, "altup_active_idx": 0,
        "altup_correct_scale": True, "laurel_rank": 8, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 40,
    },
    "Gemma4AssistantCausalLMModel": {
        **GEMMA4, "backbone_hidden_size": 24, "num_centroids": 8, "centroid_intermediate_top_k": 4,
        "num_kv_shared_layers": 2,
    },
    "Gemma4CausalLMModel": {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40},
    "Glm4CausalLMModel": {"attn_qkv_bias": True},
    "Glm4MoECausalLMModel": SHARED_EXPERTS,
    "GlmCausalLMModel": {"attn_qkv_bias": True},
    "GraniteMoECausalLMModel": EXPERTS,
    "GraniteMoeHybridCausalLMModel": {
        "layer_types": ["mamba2", "full_attention"], **_MAMBA, "shared_intermediate_size": 16, **EXPERTS,
    },
    "HunYuanMoEV1CausalLMModel": {"attn_qk_norm": True, **SHARED_EXPERTS},
    "InternLM2CausalLMModel": {"attn_qkv_bias": True},
    "JambaCausalLMModel": {
        "layer_types": ["mamba", "full_attention"], "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_dt_rank": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
    },
    "JetMoeCausalLMModel": EXPERTS,
    "LayerNormCausalLMModel": {"partial_rotary_factor": 0.5},
    "LongcatFlashCausalLMModel": {
        **EXPERTS, **_MLA, "zero_expert_num": 2, "num_hidden_layers": 4, "rope_interleave": True,
    },
    "MPTCausalLMModel": {"num_key_value_heads": 4, "hidden_act": "gelu"},
    "Mamba2CausalLMModel": {
        **_STATES, "num_heads": 4, "head_dim": 16, "intermediate_size": 64, "n_groups": 2,
    },
    "MambaCausalLMModel": _STATES,
    "MiniMaxCausalLMModel": {"layer_types": ["full_attention", "lightning_attention"], **EXPERTS},
    "MoECausalLMModel": EXPERTS,
    "ModernBertDecoderModel": {"num_key_value_heads": 4},
    "NanoChatCausalLMModel": {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    "NemotronCausalLMModel": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "NemotronHCausalLMModel": {
        "hidden_act": "relu2", "num_hidden_layers": 4, "layer_types": ["mamba2", "mlp", "full_attention", "moe"],
        **_MAMBA, **SHARED_EXPERTS,
    },
    "OLMo2CausalLMModel": _WHOLE_NORMS,
    "OPTCausalLMModel": {"hidden_act": "relu", "tie_word_embeddings": True, **_EVERY_HEAD},
    "PersimmonCausalLMModel": {"mlp_bias": True, "partial_rotary_factor": 0.5, "hidden_act": "relu2", **_EVERY_HEAD},
    "Phi3CausalLMModel": LONG_ROPE,
    "Phi3MoECausalLMModel": {**LONG_ROPE, **EXPERTS},
    "Phi3SmallCausalLMModel": {"partial_rotary_factor": 0.5},
    "PhiCausalLMModel": {"partial_rotary_factor": 0.5, "mlp_bias": True, "hidden_act": "gelu_new", **_EVERY_HEAD},
    "Qwen2MoECausalLMModel": {"attn_qkv_bias": True, **SHARED_EXPERTS},
    "Qwen35CausalLMModel": {"partial_rotary_factor": 0.5, **DELTA_LAYERS},
    "Qwen35MoECausalLMModel": {"partial_rotary_factor": 0.5, **DELTA_LAYERS, **SHARED_EXPERTS},
    "Qwen35MtpModel": {
        "partial_rotary_factor": 0.5, "num_hidden_layers": 1, "layer_types": ["full_attention"],
        "num_nextn_predict_layers": 1, "head_dim": 8, "mrope_section": [1, 1, 0],
    },
    "Qwen35VLTextModel": {"partial_rotary_factor": 0.5, **DELTA_LAYERS},
    "Qwen3CausalLMModel": {"attn_qk_norm": True},
    "Qwen3NextCausalLMModel": {
        "partial_rotary_factor": 0.5, "attn_qk_norm": True, "norm_topk_prob": True, **DELTA_LAYERS, **SHARED_EXPERTS,
    },
    "Qwen3VLTextModel": {"attn_qk_norm": True},
    "SmolLM3CausalLMModel": {"no_rope_layers": [1, 0]},
    "StarCoder2CausalLMModel": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "XLMCausalLMModel": {"hidden_act": "gelu", "tie_word_embeddings": True, **_EVERY_HEAD},
    "Zamba2CausalLMModel": {
        "num_hidden_layers": 3, "layer_types": ["mamba2", "full_attention", "mamba2"], "hybrid_layer_indices": [1],
        "attention_hidden_size": 32, "num_mem_blocks": 1, "adapter_rank": 8, "num_key_value_heads": 4, "head_dim": 8,
        **_MAMBA, "mamba_time_step_min": 0.001,
    },
}  # fmt: skip

BY_TYPE: dict[str, dict[str, Any]] = {
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v2_moe": _DEEPSEEK_V2,
    "dots1": {"attn_qk_norm": True, "n_shared_experts": 2},
    "falcon_h1": {
        "alibi": True, "attn_qkv_bias": True, "num_key_value_heads": 4, "parallel_attn": False, "hidden_act": "silu",
    },
    "flex_olmo": {**_WHOLE_NORMS, "post_feedforward_norm": True},
    "gemma4_unified_text": {**GEMMA4_UNIFIED, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    "gpt_neo": {"attn_qkv_bias": False, "attention_multiplier": 1.0},
    "olmoe": _WHOLE_NORMS,
    "openai-gpt": {"post_norm": True},
    "qwen2": {"attn_qkv_bias": True},
    "qwen3_moe": {"attn_qk_norm": True},
    "qwen3_omni_moe": {"attn_qk_norm": True},
    "qwen3_vl_moe": {"attn_qk_norm": True},
    "seed_oss": {"attn_qkv_bias": True},
    "youtu": {"num_local_experts": None, "num_experts_per_tok": None, "n_group": 1, "n_shared_experts": None,
              "first_k_dense_replace": 2, "tie_word_embeddings": True},
}  # fmt: skip
