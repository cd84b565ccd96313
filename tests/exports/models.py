"""The models that the exports are made of: configurations of transformers, with random weights, as plain records.

Layers have the widths of published small models, and are few. Weights are scaled so that attention is far from uniform:
a wrong mask, scale or position shows. `Size` stands for the widths, so that the same records give the tiny models of
tests/exports/samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PretrainedConfig

from tests.exports.sizes import PUBLISHED, Kind, Size, has_past


@dataclass(frozen=True)
class Model:
    """One architecture.

    gain scales the weights: scores have a standard deviation of about gain^2, times the square root of the head's width
    where the model does not divide by it. attention names the implementation in transformers, where its default is one
    that torch.onnx cannot export.
    """

    name: str
    kind: Kind
    architecture: str
    size: Size
    config: Callable[[Size], PretrainedConfig]
    gain: float = 1.5
    attention: str | None = None

    def build_config(self, size: Size) -> PretrainedConfig:
        config = self.config(size)
        config._attn_implementation = self.attention
        return config

    @property
    def past(self) -> bool:
        """Return whether the model has a form with past keys and values."""
        return has_past(self.kind)


def _common(size: Size) -> dict[str, Any]:
    """Return the sizes that most configurations share."""
    return {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": size.positions,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _grouped(size: Size) -> dict[str, Any]:
    """Return `_common` for decoders with fewer key/value heads."""
    head = {"head_dim": size.head} if size.head else {}
    return {**_common(size), "num_key_value_heads": size.kv_heads, **head}


def _alternating(size: Size) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    return {**_grouped(size), "sliding_window": size.window, "layer_types": [kinds[k % 2] for k in range(size.layers)]}


def _gpt2(size: Size) -> PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=size.vocab, n_embd=size.hidden, n_layer=size.layers, n_head=size.heads, n_inner=size.inner,
        n_positions=size.positions, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


def _distilbert(size: Size) -> PretrainedConfig:
    return transformers.DistilBertConfig(
        vocab_size=size.vocab, dim=size.hidden, n_layers=size.layers, n_heads=size.heads, hidden_dim=size.inner,
        max_position_embeddings=size.positions,
    )  # fmt: skip


def _opt(size: Size) -> PretrainedConfig:
    shared = _common(size)
    return transformers.OPTConfig(ffn_dim=shared.pop("intermediate_size"), word_embed_proj_dim=size.hidden, **shared)


def _falcon(size: Size) -> PretrainedConfig:
    shared = _common(size)
    return transformers.FalconConfig(ffn_hidden_size=shared.pop("intermediate_size"), multi_query=True, **shared)


def _bloom(size: Size) -> PretrainedConfig:
    return transformers.BloomConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, n_layer=size.layers, n_head=size.heads,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip


def _t5(size: Size) -> PretrainedConfig:
    return transformers.T5Config(
        vocab_size=size.vocab, d_model=size.hidden, d_kv=size.hidden // size.heads, d_ff=size.inner,
        num_layers=size.layers, num_heads=size.heads, decoder_start_token_id=0,
    )  # fmt: skip


def _gated_t5(size: Size) -> PretrainedConfig:
    config = _t5(size)
    config.dense_act_fn, config.is_gated_act = "gelu_new", True
    return config


def _two_stacks(size: Size) -> dict[str, Any]:
    """Return the sizes of encoder-decoders that come from BART."""
    return {
        "vocab_size": size.vocab,
        "d_model": size.hidden,
        "encoder_layers": size.layers,
        "decoder_layers": size.layers,
        "encoder_attention_heads": size.heads,
        "decoder_attention_heads": size.heads,
        "encoder_ffn_dim": size.inner,
        "decoder_ffn_dim": size.inner,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "decoder_start_token_id": 0,
    }


def _whisper(size: Size) -> PretrainedConfig:
    return transformers.WhisperConfig(
        num_mel_bins=size.mels,
        max_source_positions=size.frames // 2,
        max_target_positions=size.positions,
        **_two_stacks(size),
    )


def _patches(size: Size) -> dict[str, Any]:
    return {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "image_size": size.image,
        "patch_size": size.patch,
    }


def _clip(size: Size) -> PretrainedConfig:
    return transformers.CLIPConfig(
        text_config={**_common(size), "projection_dim": size.projection},
        vision_config={**_patches(size.vision or size), "projection_dim": size.projection},
        projection_dim=size.projection,
    )


_BASE = Size(768, 12, 3072)

MODELS: tuple[Model, ...] = (
    Model("bert", "encoder", "BertModel", _BASE, lambda s: transformers.BertConfig(**_common(s))),
    Model("roberta", "encoder", "RobertaModel", _BASE, lambda s: transformers.RobertaConfig(**_common(s))),
    Model("distilbert", "encoder", "DistilBertModel", _BASE, _distilbert),
    Model(
        "modernbert", "encoder", "ModernBertModel", Size(768, 12, 1152),
        lambda s: transformers.ModernBertConfig(
            **_common(s), local_attention=s.window, layer_types=["sliding_attention", "full_attention"],
            cls_token_id=3, sep_token_id=4,
        ),
    ),
    Model("gpt2", "decoder", "GPT2LMHeadModel", _BASE, _gpt2),
    Model("opt", "decoder", "OPTForCausalLM", _BASE, _opt),
    Model("gpt-neox", "decoder", "GPTNeoXForCausalLM", _BASE, lambda s: transformers.GPTNeoXConfig(**_common(s))),
    Model(
        "llama", "decoder", "LlamaForCausalLM", Size(576, 9, 1536, 3),
        lambda s: transformers.LlamaConfig(**_grouped(s)),
    ),
    Model(
        "qwen2", "decoder", "Qwen2ForCausalLM", Size(896, 14, 4864, 2),
        lambda s: transformers.Qwen2Config(**_grouped(s)),
    ),
    Model(
        "qwen3", "decoder", "Qwen3ForCausalLM", Size(1024, 16, 3072, 8, 128),
        lambda s: transformers.Qwen3Config(**_grouped(s)),
    ),
    Model(
        "mistral", "decoder", "MistralForCausalLM", Size(1024, 16, 2816, 4),
        lambda s: transformers.MistralConfig(**_grouped(s), sliding_window=s.window),
    ),
    Model(
        "gemma2", "decoder", "Gemma2ForCausalLM", Size(1152, 4, 2304, 2, 256),
        lambda s: transformers.Gemma2Config(
            **_alternating(s), query_pre_attn_scalar=s.head, attn_logit_softcapping=4.0
        ),
    ),
    Model(
        "gemma3", "decoder", "Gemma3ForCausalLM", Size(640, 4, 2048, 1, 256),
        lambda s: transformers.Gemma3TextConfig(**_alternating(s), query_pre_attn_scalar=s.head),
    ),
    Model(
        "phi", "decoder", "PhiForCausalLM", Size(1024, 16, 4096, 16),
        lambda s: transformers.PhiConfig(**_grouped(s)),
    ),
    Model("falcon", "decoder", "FalconForCausalLM", Size(1024, 16, 4096), _falcon, attention="eager"),
    Model("bloom", "decoder", "BloomForCausalLM", Size(1024, 16, 4096), _bloom),
    Model("t5", "seq2seq", "T5ForConditionalGeneration", Size(512, 8, 2048), _t5, gain=0.5),
    Model(
        "bart", "seq2seq", "BartForConditionalGeneration", _BASE,
        lambda s: transformers.BartConfig(**_two_stacks(s), max_position_embeddings=s.positions),
    ),
    Model("whisper", "speech", "WhisperForConditionalGeneration", Size(384, 6, 1536), _whisper),
    Model("vit", "vision", "ViTModel", _BASE, lambda s: transformers.ViTConfig(**_patches(s))),
    Model("clip", "clip", "CLIPModel", Size(512, 8, 2048), _clip),
)  # fmt: skip


def _published_only(name: str, architecture: str, config: Callable[[Size], PretrainedConfig], **options: Any) -> Model:
    about = PUBLISHED[name]
    return Model(name, about.kind, architecture, about.size, config, **options)


# Next to those of docs/models.md: relatives of them that write a gate or a pooling in another way.
MORE_MODELS: tuple[Model, ...] = (
    _published_only("phi3", "Phi3ForCausalLM", lambda s: transformers.Phi3Config(**_grouped(s))),
    _published_only("flan-t5", "T5ForConditionalGeneration", _gated_t5, gain=0.5),
    _published_only("siglip", "SiglipVisionModel", lambda s: transformers.SiglipVisionConfig(**_patches(s))),
)

BY_NAME = {model.name: model for model in (*MODELS, *MORE_MODELS)}
