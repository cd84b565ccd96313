"""Small sizes of models that decode the states of an encoder of texts or sounds, and of speech tokenizers."""

from __future__ import annotations

from typing import Any

_BART = {"hidden_act": "gelu", "num_decoder_layers": 2, "num_key_value_heads": 4}
_QWEN3_AUDIO = {
    "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24, "num_mel_bins": 16,
    "max_source_positions": 64, "downsample_hidden_size": 8, "output_dim": 16, "audio_token_id": 3,
}  # fmt: skip
_SANM_AUDIO = {
    "input_size": 16, "attention_dim": 16, "attention_heads": 4, "num_blocks": 3, "linear_units": 24, "kernel_size": 5,
    "tp_num_blocks": 2, "output_dim": 16,
}  # fmt: skip
_CODEC = {
    "codebook_dim": 8, "codebook_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 48,
}  # fmt: skip

BY_TASK: dict[str, dict[str, Any]] = {"seq2seq": _BART}

# Dictionaries under "audio" and so on are the fields of a configuration of that part.
BY_CLASS: dict[str, dict[str, Any]] = {
    "EncDecRNNTModel": {
        "num_key_value_heads": 4, "fastconformer_feat_in": 16, "fastconformer_subsampling_conv_channels": 8,
        "fastconformer_pos_emb_max_len": 64, "fastconformer_att_context_size": (6, 1),
        "fastconformer_streaming_cache_size": 6, "rnnt_pred_hidden": 16, "rnnt_joint_hidden": 16,
        "rnnt_num_classes": 20,
    },
    "FunASRForConditionalGeneration": {
        "attn_qk_norm": True,
        "audio": {
            **_SANM_AUDIO, "audio_token_id": 3, "adaptor_proj_dim": 24, "adaptor_num_blocks": 2, "adaptor_ffn_dim": 8,
            "adaptor_num_heads": 4,
        },
    },
    "Qwen3ASRForConditionalGeneration": {
        "attn_qk_norm": True, "head_dim": 8, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "audio": _QWEN3_AUDIO,
    },
    "Qwen3TTSForConditionalGeneration": {
        "attn_qk_norm": True, "head_dim": 8, "mrope_section": [2, 1, 1], "mrope_interleaved": True,
        "tts": {
            "text_hidden_size": 16, "text_vocab_size": 40, "num_code_groups": 4, "codec_bos_id": 1,
            "codec_eos_token_id": 2, "codec_pad_id": 0, "codec_think_id": 3, "codec_nothink_id": 4,
            "code_predictor": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 40, "num_code_groups": 4,
            },
            "speaker_encoder": {
                "mel_dim": 16, "enc_dim": 16, "enc_channels": [16, 16, 16, 16, 48], "enc_attention_channels": 8,
                "enc_res2net_scale": 4, "enc_se_channels": 8,
            },
        },
    },
    "Qwen3TTSTokenizerV2Model": {
        "codec_decoder": {
            **_CODEC, "latent_dim": 16, "decoder_dim": 32, "num_quantizers": 4, "upsample_rates": [2, 2],
            "upsampling_ratios": [2],
        },
        "codec_encoder": {**_CODEC, "num_quantizers": 4},
    },
    "SenseVoiceSmallModel": {"audio": _SANM_AUDIO},
    "T5ForConditionalGeneration": {
        "hidden_act": "relu", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    },
    "WhisperForConditionalGeneration": {
        **_BART, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 24, "max_source_positions": 16,
        "max_target_positions": 48,
    },
}  # fmt: skip

_GATED = {"hidden_act": "gelu_new", "is_gated_act": True}

BY_TYPE: dict[str, dict[str, Any]] = {
    "marian": {"hidden_act": "silu"},
    "mbart": {"tie_word_embeddings": True},
    "mt5": _GATED,
    "pegasus": {"hidden_act": "relu"},
    "qwen3_forced_aligner": {"audio": {**_QWEN3_AUDIO, "classify_num": 10}},
    "umt5": {**_GATED, "head_dim": 8},
}
