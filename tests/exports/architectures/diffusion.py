"""Small sizes of the parts of diffusion pipelines, by class of diffusers."""

from __future__ import annotations

from typing import Any

_TRANSFORMER = {
    "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "cross_attention_dim": 8, "sample_size": 8,
}  # fmt: skip
_JOINT = {**_TRANSFORMER, "joint_attention_dim": 8}
_VAE = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16}

BY_TYPE: dict[str, dict[str, Any]] = {
    "AutoencoderKL": _VAE,
    "AutoencoderKLCogVideoX": _VAE,
    "AutoencoderKLQwenImage": {
        "base_dim": 8, "z_dim": 4, "dim_mult": (1, 2), "num_res_blocks": 1, "temperal_downsample": (True,),
    },
    "CogVideoXTransformer3DModel": {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8,
        "text_embed_dim": 8, "num_layers": 1, "sample_height": 8, "sample_width": 8, "sample_frames": 5,
        "max_text_seq_length": 6, "cross_attention_dim": 8,
    },
    "DiTTransformer2DModel": {**_TRANSFORMER, "caption_channels": 8},
    "FluxTransformer2DModel": {**_JOINT, "in_channels": 8, "out_channels": 8, "num_single_layers": 1},
    "HunyuanDiT2DModel": _TRANSFORMER,
    "PixArtTransformer2DModel": {**_TRANSFORMER, "caption_channels": 8},
    "QwenImageTransformer2DModel": {
        "in_channels": 8, "out_channels": 2, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 8, "axes_dims_rope": (2, 4, 2), "cross_attention_dim": 8,
    },
    "SD3Transformer2DModel": {
        **_JOINT, "in_channels": 4, "out_channels": 4, "pooled_projection_dim": 8, "caption_projection_dim": 16,
    },
    "UNet2DConditionModel": {
        "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 8,
        "attention_head_dim": 2, "sample_size": 8,
    },
}  # fmt: skip
