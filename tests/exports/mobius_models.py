"""Tiny decoders as ONNX Runtime's own exporter writes them (package mobius-onnx), with random weights.

`python tests/exports/mobius_models.py llama gemma3_text@cpu llama@static --folder F` writes F/llama.onnx and so on.
After @ stands an execution provider of the exporter, "static" for caches of a fixed capacity, or "encoder" for that of
an encoder-decoder, of which the decoder is written otherwise. Without names it writes what tests/exports/decoders
keeps. Needs `pip install mobius-onnx==0.1.0 onnx-shape-inference`, and PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

CAPACITY = 48  # of static caches

_SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "num_hidden_layers": 2, "vocab_size": 40, "max_position_embeddings": 48, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_type": "default", "rope_theta": 1e4, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4}
_MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "rope_interleave": True,
}  # fmt: skip
_EVERY_HEAD = {"num_key_value_heads": 4, "attn_qkv_bias": True, "attn_o_bias": True}

_DELTA_LAYERS = {"layer_types": ["linear_attention", "full_attention"], **_DELTA}
_LONG_ROPE = {
    "partial_rotary_factor": 0.5, "rope_type": "longrope", "original_max_position_embeddings": 48,
    "rope_scaling": {"short_factor": [1.0], "long_factor": [1.0]},
}  # fmt: skip
_BART = {"hidden_act": "gelu", "num_decoder_layers": 2, "num_key_value_heads": 4}
_T5 = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
_GEMMA3 = {
    "attn_qk_norm": True, "rope_local_base_freq": 1e4, "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
}  # fmt: skip

# By architecture the class of its configuration, and what differs from the sizes above.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", {"layer_types": ["mamba2", "full_attention"], **_MAMBA, "mamba_expand": 2}),
    "bart": ("", dict(_BART)),
    "blenderbot": ("", dict(_BART)),
    "bloom": ("", {"alibi": True, "mlp_bias": True, **_EVERY_HEAD}),
    "chatglm": ("", {}),
    "cohere": ("", {"tie_word_embeddings": True, "logit_scale": 0.0625}),
    "ctrl": ("", {"hidden_act": "relu", "tie_word_embeddings": True, **_EVERY_HEAD}),
    "deepseek_v2": ("", {**_EXPERTS, **_MLA, "scoring_func": "softmax", "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("", {**_EXPERTS, **_MLA}),
    "deepseek_v4": (
        "",
        {**_EXPERTS, "num_key_value_heads": 1, "head_dim": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "o_groups": 2,
         "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 4, "index_topk": 2, "compress_ratios": [0, 4],
         "scoring_func": "sqrtsoftplus", "n_shared_experts": 1, "routed_scaling_factor": 1.5, "num_hash_layers": 1,
         "hc_mult": 2, "hc_sinkhorn_iters": 3, "swiglu_limit": 7.0},
    ),
    "ernie4_5": ("", {}),
    "falcon": ("", {"parallel_attn": True, "dual_ln": True, "hidden_act": "gelu"}),
    "falcon_h1": ("", {"alibi": True, "attn_qkv_bias": True, "num_key_value_heads": 4, "dual_ln": True}),
    "gemma": ("", {}),
    "gemma2": (
        "Gemma2Config",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 4},
    ),
    "gemma3_text": ("", dict(_GEMMA3)),
    "gemma3n_text": (
        "Gemma3nConfig",
        {**_GEMMA3, "hidden_act": "gelu_pytorch_tanh", "altup_num_inputs": 2, "altup_active_idx": 0,
         "altup_correct_scale": True, "laurel_rank": 8, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 40},
    ),
    "gemma4_text": (
        "Gemma4Config",
        {**_GEMMA3, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 8,
         "global_rope_theta": 1e4, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 8,
         "vocab_size_per_layer_input": 40},
    ),
    "gpt2": ("", {"hidden_act": "gelu_new", "tie_word_embeddings": True, **_EVERY_HEAD}),
    "gpt_oss": ("", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, **_EXPERTS}),
    "granite": ("", {}),
    "granitemoe": ("", dict(_EXPERTS)),
    "hunyuan_v1_moe": ("", {"attn_qk_norm": True, "shared_expert_intermediate_size": 16, **_EXPERTS}),
    "internlm2": ("", {"attn_qkv_bias": True}),
    "llama": ("", {}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "intermediate_size": 64, "state_size": 8, "n_groups": 2, "conv_kernel": 4,
         "expand": 2},
    ),
    "marian": ("", {**_BART, "hidden_act": "silu"}),
    "mbart": ("", {**_BART, "tie_word_embeddings": True}),
    "minicpm": ("", {}),
    "minimax": ("", {"layer_types": ["full_attention", "lightning_attention"], **_EXPERTS}),
    "mixtral": ("", dict(_EXPERTS)),
    "nanochat": ("NanoChatConfig", {"hidden_act": "relu2", "final_logit_softcapping": 15.0}),
    "nemotron": ("", {"hidden_act": "relu2", "partial_rotary_factor": 0.5}),
    "olmo2": ("", {"attn_qk_norm": True, "attn_qk_norm_full": True}),
    "openelm": ("", {}),
    "opt": ("", {"hidden_act": "relu", "tie_word_embeddings": True, **_EVERY_HEAD}),
    "pegasus": ("", {**_BART, "hidden_act": "relu"}),
    "persimmon": ("", {"mlp_bias": True, "partial_rotary_factor": 0.5, "hidden_act": "relu2", **_EVERY_HEAD}),
    "phi": ("", {"partial_rotary_factor": 0.5, "mlp_bias": True, "hidden_act": "gelu_new", **_EVERY_HEAD}),
    "phi3": ("", dict(_LONG_ROPE)),
    "phi3small": ("", {"partial_rotary_factor": 0.5}),
    "phimoe": ("", {**_LONG_ROPE, **_EXPERTS}),
    "qwen": ("", {}),
    "qwen2": ("", {"attn_qkv_bias": True}),
    "qwen2_moe": ("", {"attn_qkv_bias": True, "shared_expert_intermediate_size": 16, **_EXPERTS}),
    "qwen3": ("", {"attn_qk_norm": True}),
    "qwen3_5_moe": (
        "", {"partial_rotary_factor": 0.5, "shared_expert_intermediate_size": 16, **_DELTA_LAYERS, **_EXPERTS}
    ),
    "qwen3_5_text": ("", {"partial_rotary_factor": 0.5, **_DELTA_LAYERS}),
    "qwen3_moe": ("", {"attn_qk_norm": True, **_EXPERTS}),
    "qwen3_next": (
        "",
        {"partial_rotary_factor": 0.5, "attn_qk_norm": True, "norm_topk_prob": True,
         "shared_expert_intermediate_size": 16, **_DELTA_LAYERS, **_EXPERTS},
    ),
    "smollm3": ("", {"no_rope_layers": [1, 0]}),
    "stablelm": ("", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "t5": ("", {**_BART, **_T5, "hidden_act": "relu"}),
    "trocr": ("", dict(_BART)),
    "umt5": ("", {**_BART, **_T5, "hidden_act": "gelu_new", "is_gated_act": True, "head_dim": 8}),
    "whisper": (
        "WhisperConfig",
        {**_BART, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 24, "max_source_positions": 16,
         "max_target_positions": 48},
    ),
    "zamba": ("", {}),
    "zamba2": (
        "Zamba2Config",
        {"num_hidden_layers": 3, "layer_types": ["mamba2", "full_attention", "mamba2"], "hybrid_layer_indices": [1],
         "attention_hidden_size": 32, "num_mem_blocks": 1, "adapter_rank": 8, "num_key_value_heads": 4, "head_dim": 8,
         **_MAMBA, "mamba_expand": 2, "mamba_time_step_min": 0.001},
    ),
}  # fmt: skip

KEPT = (
    "bamba", "bart", "bloom", "deepseek_v3", "deepseek_v4", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gpt2", "gpt_oss", "llama", "llama@cpu", "llama@onnx-standard", "llama@static", "mamba2", "minimax", "mixtral",
    "phi3", "qwen3", "qwen3@static", "bamba@onnx-standard", "qwen3_5_text", "t5", "whisper",
)  # fmt: skip


def build(name: str) -> ir.Model:
    """Return the model of an architecture, exported for what stands after @."""
    from mobius import _configs, tasks
    from mobius._builder import build_from_module
    from mobius._config_resolver import _default_task_for_model
    from mobius._registry import registry

    architecture, _, form = name.partition("@")
    kind, changes = MODELS[architecture]
    config_class = getattr(_configs, kind or "ArchitectureConfig")
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {key: value for key, value in {**_SIZES, **changes}.items() if key in fields}
    has_provider = form not in ("", "static", "encoder")
    if has_provider or form == "static":
        sizes["head_dim"] = 16  # what GroupQueryAttention asks for
    config = config_class(**sizes)
    is_static = form == "static"
    task: Any = _default_task_for_model(architecture)
    if is_static:
        task = tasks.CausalLMTask(static_cache=True, max_seq_len=CAPACITY)
    provider = form if has_provider else "default"
    module = registry.get(architecture)(config)
    package = build_from_module(module, config, task, execution_provider=provider)
    model = package[form if form == "encoder" else "decoder" if "decoder" in package else "model"]
    fill(model, architecture)
    common.ClearMetadataAndDocStringPass()(model)
    return model


def fill(model: ir.Model, seed: str) -> None:
    """Give random numbers to the weights, so that activations stay about 1."""
    rng = np.random.default_rng(int(hashlib.sha256(seed.encode()).hexdigest()[:8], 16))
    for value in model.graph.initializers.values():
        if value.const_value is not None or value.shape is None or value.name is None or value.dtype is None:
            continue
        shape = [size if isinstance(size, int) else 1 for size in value.shape]
        array = rng.standard_normal(shape) / np.sqrt(max(shape[-1:], default=1))
        if "norm" in value.name and len(shape) == 1:
            array = 1 + 0.2 * rng.standard_normal(shape)
        value.const_value = ir.Tensor(array.astype(value.dtype.numpy()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="architectures, with @provider or @static")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "decoders")
    parser.add_argument("--all", action="store_true", help="every architecture of the table")
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    for name in arguments.names or (MODELS if arguments.all else KEPT):
        ir.save(build(name), arguments.folder / f"{name}.onnx")
        print(name)


if __name__ == "__main__":
    main()
