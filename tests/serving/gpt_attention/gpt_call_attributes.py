"""The attributes of gpt_attention that a configuration fixes: numbers small enough for short requests to reach them."""

from __future__ import annotations

from typing import Any

from tests.serving.gpt_attention.gpt_case_features import NA, Features
from tests.serving.gpt_attention.gpt_rotary_reference import POSITION_TYPES, SCALE_TYPES
from tests.serving.gpt_attention.gpt_score_reference import MASK_TYPES

MAX_POSITIONS = 16  # of dynamic and longrope: some requests are longer, some shorter
MAX_DISTANCE = 23  # of the bias in buckets: with 4 to 12 buckets no distance lies on the border of two


def make_attributes(case: Features) -> dict[str, Any]:
    """Return the arguments that are not arrays. Some of those at their defaults are left out."""
    heads, kv_heads = case.heads
    result: dict[str, Any] = {"num_heads": heads, "hidden_size_per_head": case.head_size}
    if kv_heads != heads or case.redundant:
        result["num_kv_heads"] = kv_heads
    if case.layer:
        result["layer_idx"] = case.layer
    if case.q_scaling != 1.0:
        result["q_scaling"] = case.q_scaling
    if case.softcap:
        result["attn_logit_softcapping_scale"] = 1.25
    if case.tp != (1, 0):
        result["tp_size"], result["tp_rank"] = case.tp
    if case.cache == "none":
        result["use_cache"] = False
    for name, value, default in (
        ("attend_current_unquantized", case.attend_current_unquantized, True),
        ("use_fp8_context_fmha", case.fp8_context_fmha, False),
        ("use_one_more_block", case.one_more_block, False),
        ("streamingllm", case.streamingllm, False),
        ("trt_mmha_compat", case.compat, False),
        ("do_cross_attention", case.cross != "none", False),
        ("multi_block_mode", case.splits, None),
    ):
        if value is not default:
            result[name] = value
    if case.redundant:
        result["max_context_length"] = 64
        if case.cache != "none":
            result["kv_cache_quant_mode"] = 3  # unused bits
    _enumerate(result, case, "position_embedding_type", case.position, POSITION_TYPES, "learned_absolute")
    _masks(result, case)
    _rotary(result, case)
    if case.relative_bias in ("implicit", "bidirectional"):
        result["max_distance"] = MAX_DISTANCE
        result["relative_attention_bidirectional"] = case.relative_bias == "bidirectional"
    return result


def _enumerate(
    result: dict[str, Any], case: Features, argument: str, value: str, names: tuple[str, ...], default: str
) -> None:
    if value != default or case.redundant:
        result[argument] = value if case.names else names.index(value)


def _masks(result: dict[str, Any], case: Features) -> None:
    if case.mask == "custom_mask" and not case.redundant:
        return  # the mask itself has the heads
    _enumerate(result, case, "mask_type", case.mask, MASK_TYPES, "causal")
    if case.mask == "blocksparse":
        result["block_sparse_block_size"] = 3
        result["block_sparse_num_local_blocks"] = 2
        result["block_sparse_vertical_stride"] = 4 if case.tp == (1, 0) else 13
        result["block_sparse_homo_head_pattern"] = case.homo_head_pattern


def _rotary(result: dict[str, Any], case: Features) -> None:
    if case.rotary_dim == NA:
        if case.redundant:
            result["rotary_embedding_dim"] = case.head_size  # without a rotary position type it is unused
        return
    dim = {"zero": 0, "two": 2, "half": case.head_size // 2, "all": case.head_size}[case.rotary_dim]
    result["rotary_embedding_dim"] = dim
    if case.redundant or case.position not in ("long_rope", "yarn"):  # which imply it
        _enumerate(result, case, "rotary_embedding_scale_type", case.scaling, SCALE_TYPES, "none")
    if case.scaling == "linear":
        result["rotary_embedding_scale"] = 2.5
    if case.scaling == "dynamic":
        result["rotary_embedding_scale"] = 3.0
        result["rotary_embedding_max_positions"] = MAX_POSITIONS
    if case.scaling == "llama3":
        full = {"factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 5.0, "original_max_position_embeddings": 64}
        result["rope_scaling_config"] = {
            "default": None,
            "partial": {"low_freq_factor": 2.0, "original_max_position_embeddings": 48},
            "full": full,
        }[case.rope_config]
        result["rotary_embedding_scale"] = 3.0  # except llama3's factor, which stays at its default
    if case.scaling == "yarn":
        result["rotary_embedding_base"] = 500.0
        result["rotary_embedding_scale"] = 4.0
        result["rotary_embedding_original_max_positions"] = 512
        result["rope_scaling_config"] = {
            "default": None,
            "partial": {"beta_slow": 2, "mscale": 0.7, "original_max_position_embeddings": 12},  # equal bounds
            "full": {
                "factor": 8.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16,
                "beta_slow": 0.5,
                "mscale": 0.8,
                "mscale_all_dim": 0.5,
            },
        }[case.rope_config]
    if case.scaling == "longrope":
        result["rotary_embedding_max_positions"] = MAX_POSITIONS * (1 if case.rope_config == "partial" else 4)
        result["rotary_embedding_original_max_positions"] = MAX_POSITIONS
        result["rope_scaling_config"] = {
            "short_factor": [1.0 + 0.1 * k for k in range(dim // 2)],
            "long_factor": [2.0 + 0.7 * k for k in range(dim // 2)],
        }
        if case.rope_config == "full":
            result["rotary_embedding_short_m_scale"] = 1.1
            result["rotary_embedding_long_m_scale"] = 0.85
