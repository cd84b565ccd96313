"""Small sizes of encoders of texts, images and sounds: what differs from those of decoders."""

from __future__ import annotations

from typing import Any

_IMAGES = {"hidden_act": "gelu", "image_size": 32, "patch_size": 8, "num_channels": 3, "num_key_value_heads": 4}

BY_TASK: dict[str, dict[str, Any]] = {
    "feature-extraction": {"hidden_act": "gelu", "type_vocab_size": 2, "num_key_value_heads": 4},
    "image-classification": _IMAGES,
    "object-detection": _IMAGES,
    "audio-feature-extraction": {"hidden_act": "gelu", "num_key_value_heads": 4},
    "ctc-asr": {"hidden_act": "gelu", "num_key_value_heads": 4},
}

BY_CLASS: dict[str, dict[str, Any]] = {
    "CLIPTextModel": {"type_vocab_size": 0},
    "CLIPVisionModel": {"hidden_act": "quick_gelu"},
    "DepthAnythingForDepthEstimation": {
        "backbone_out_indices": [1, 2], "neck_hidden_sizes": [8, 16], "reassemble_factors": [2.0, 1.0],
        "fusion_hidden_size": 8, "head_hidden_size": 8,
    },
    "DistilBertModel": {"type_vocab_size": 0},
    "ModernBertModel": {"type_vocab_size": 0},
    "Sam2VisionModel": {
        "image_size": 64, "sam2_embed_dims": [8, 16, 32, 64], "sam2_blocks_per_stage": [1, 1, 2, 1],
        "sam2_num_heads_per_stage": [1, 2, 4, 8], "sam2_mlp_ratio": 2.0, "sam2_fpn_hidden_size": 16,
    },
    "SegformerForSemanticSegmentation": {
        "segformer_hidden_sizes": [8, 16], "segformer_num_attention_heads": [1, 2], "segformer_depths": [1, 1],
        "segformer_sr_ratios": [2, 1], "segformer_mlp_ratios": [2, 2], "segformer_patch_sizes": [3, 3],
        "segformer_strides": [2, 2], "decoder_hidden_size": 8, "num_labels": 5,
    },
    "YolosForObjectDetection": {
        "image_height": 32, "image_width": 32, "num_detection_tokens": 6, "num_labels": 5,
    },
}  # fmt: skip

_ONE_TYPE = {"type_vocab_size": 1}

BY_TYPE: dict[str, dict[str, Any]] = {
    "camembert": _ONE_TYPE,
    "data2vec-text": _ONE_TYPE,
    "roberta": _ONE_TYPE,
    "roberta-prelayernorm": _ONE_TYPE,
    "xlm-roberta": _ONE_TYPE,
    "xlm-roberta-xl": _ONE_TYPE,
}
