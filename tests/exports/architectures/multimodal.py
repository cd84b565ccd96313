"""Small sizes of models that read images, and sounds, next to text: differences from decoders."""

from __future__ import annotations

from typing import Any

from tests.exports.architectures.decoders import (
    DELTA_LAYERS,
    EXPERTS,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    LONG_ROPE,
    SHARED_EXPERTS,
)

_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_GRIDS = {**_VISION, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 16}
_SEEN = {"vision": _VISION, "image_token_id": 3}
_QWEN = {
    "vision": _GRIDS, "image_token_id": 3, "temporal_patch_size": 2, "head_dim": 8, "mrope_section": [2, 1, 1],
}  # fmt: skip
_QWEN3 = {
    **_QWEN, "vision": {**_GRIDS, "fullatt_block_indexes": [0], "window_size": 4}, "attn_qk_norm": True,
    "deepstack_visual_indexes": [0],
}  # fmt: skip
_LORA = {"r": 4, "lora_alpha": 8}

BY_TASK: dict[str, dict[str, Any]] = {
    "vision-language": _SEEN,
    "pixtral-vl": _SEEN,
    "hunyuan-vl-mot": {**_SEEN, "attn_qk_norm": True},
    "qwen-vl": _QWEN,
    "qwen3-vl-vision-language": _QWEN3,
    "hybrid-qwen-vl": {**_QWEN3, "partial_rotary_factor": 0.5, **DELTA_LAYERS},
}

BY_CLASS: dict[str, dict[str, Any]] = {
    "Blip2Model": {
        "num_query_tokens": 4, "qformer_hidden_size": 16, "qformer_num_hidden_layers": 1,
        "qformer_num_attention_heads": 2, "qformer_intermediate_size": 24,
    },
    "DeepSeekOCR2CausalLMModel": {**EXPERTS, "n_shared_experts": 1},
    "Gemma3MultiModalModel": {**GEMMA3, "vision": {**_VISION, "mm_tokens_per_image": 4}, "mm_tokens_per_image": 4},
    "Gemma4Model": {
        **GEMMA4, "vision": {**_VISION, "mm_tokens_per_image": 4}, "mm_tokens_per_image": 4, "image_token_id": 3,
    },
    "Gemma4UnifiedModel": {
        **GEMMA4_UNIFIED, "image_token_id": 3,
        "vision": {
            "hidden_size": 48, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
            "out_hidden_size": 48,
        },
    },
    "MllamaCausalLMModel": {
        "num_hidden_layers": 3, "vision": _VISION, "image_token_id": 3, "cross_attention_layers": [1],
    },
    "Phi4MMMultiModalModel": {
        **LONG_ROPE, "image_token_id": 3, "vision": {**_VISION, "lora": _LORA, "image_crop_size": 28},
        "audio": {
            "attention_dim": 16, "attention_heads": 4, "num_blocks": 2, "linear_units": 24, "kernel_size": 3,
            "input_size": 16, "conv_channels": 8, "t5_bias_max_distance": 16, "projection_hidden_size": 16,
            "token_id": 4, "lora": _LORA,
        },
    },
    "Qwen35MoEVL3ModelCausalLMModel": SHARED_EXPERTS,
    "Qwen3VL3ModelCausalLMModel": _QWEN3,
}  # fmt: skip
