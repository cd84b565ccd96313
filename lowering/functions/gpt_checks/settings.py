"""Checks of the settings of gpt_attention: sizes, types, masks, windows, and their combinations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...ops.tensorrt_llm.settings import MASKS, POSITIONS, CommonSettings
from .rotation import check_rotation
from .values import INTEGERS, check_array, check_flag, check_integer, check_member, check_number, refuse

INT8, FP8 = 64, 128  # flags of kv_cache_quant_mode; its other bits are ignored

_FLAGS = (
    "do_cross_attention", "use_cache", "streamingllm", "use_one_more_block", "use_fp8_context_fmha",
    "attend_current_unquantized", "trt_mmha_compat", "relative_attention_bidirectional",
    "block_sparse_homo_head_pattern",
)  # fmt: skip
_CACHE_ARGUMENTS = (
    "past_key_value", "host_kv_cache_pool_pointers", "kv_cache_block_offsets", "host_kv_cache_block_offsets",
    "host_kv_cache_pool_mapping", "cache_indirection",
)  # fmt: skip
# prefixes of names, and TensorRT-LLM's values that ask for nothing
_REFUSED = ("vision_", "spec_decoding_", "mrope_", "is_mla_enabled_flag", "cp_", "skip_attn")
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "is_mla_enabled_flag": (False,), "cp_size": (1,), "cp_rank": (0,), "cp_group": (0, [0]),
    "spec_decoding_is_generation_length_variable": (False,), "spec_decoding_max_generation_length": (1,),
    "vision_start": (-1,), "vision_length": (-1,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallSettings(CommonSettings):
    """The settings of a call of the function."""

    position: str
    mode: int  # INT8, FP8 or 0

    @property
    def queries(self) -> int:
        """Return the number of columns of Q."""
        return self.heads * self.size

    @property
    def keys(self) -> int:
        """Return the number of columns of K, which is that of V."""
        return self.kv_heads * self.size


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Reject keyword arguments that the function does not have, unless their values ask for nothing.

    Args:
        unknown: the keyword arguments that are not the function's own.

    Raises:
        NotImplementedError: TensorRT-LLM has the argument.
        TypeError: TensorRT-LLM does not have it.
    """
    for name, value in unknown.items():
        if not name.startswith(_REFUSED):
            raise TypeError(f"gpt_attention() got an unexpected keyword argument '{name}'.")
        neutrals = _NEUTRAL_VALUES.get(name, ())
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in neutrals):
            raise NotImplementedError(f"gpt_attention does not support {name}: leave it out.")


def check_settings(arguments: Mapping[str, Any]) -> CallSettings:
    """Check and return the settings."""
    flags = {name: check_flag(name, arguments[name]) for name in _FLAGS}
    heads = check_integer("num_heads", arguments["num_heads"], 1)
    num_kv_heads = arguments["num_kv_heads"]
    kv_heads = heads if num_kv_heads is None else check_integer("num_kv_heads", num_kv_heads, 1)
    if heads % kv_heads:
        refuse(
            "gpt_attention.heads_not_divisible",
            f"num_heads is {heads} and num_kv_heads {kv_heads}",
            "make num_heads a multiple of num_kv_heads",
        )
    size = check_integer("hidden_size_per_head", arguments["hidden_size_per_head"], 1)
    cross, cached = flags["do_cross_attention"], flags["use_cache"]
    mask, position = _check_mask(arguments), _check_position(arguments)
    mode = _check_mode(arguments)
    if flags["use_fp8_context_fmha"] and mode != FP8:
        refuse(
            "gpt_attention.fp8_cache_required",
            f"use_fp8_context_fmha needs a cache of float8_e4m3fn, and kv_cache_quant_mode is "
            f"{arguments['kv_cache_quant_mode']}",
            f"set kv_cache_quant_mode to {FP8}, or use_fp8_context_fmha to False",
        )
    if not cached:
        _reject_cache_arguments(arguments, mode)
    if cross:
        _check_cross(arguments, position)
    layer = check_integer("layer_idx", arguments["layer_idx"], 0)
    _check_window(arguments)
    _check_numbers(arguments)
    return CallSettings(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        layer=layer,
        position=position,
        mask=mask,
        rotary=check_rotation(arguments, position, size),
        has_cache=cached,
        is_cross=cross,
        is_streaming=flags["streamingllm"],
        is_trt_compatible=flags["trt_mmha_compat"],
        has_spare_block=flags["use_one_more_block"],
        mode=mode,
        max_distance=check_integer("max_distance", arguments["max_distance"], 0),
        is_bidirectional=flags["relative_attention_bidirectional"],
    )


def _check_mask(arguments: Mapping[str, Any]) -> str:
    mask = check_member("mask_type", arguments["mask_type"], MASKS)
    if arguments["attention_mask"] is not None or arguments["attention_packed_mask"] is not None:
        return "custom_mask"
    if mask == "custom_mask":
        refuse(
            "gpt_attention.mask_missing",
            "mask_type is custom_mask, and there is no mask",
            "give attention_mask or attention_packed_mask",
        )
    if mask == "blocksparse":
        check_integer("block_sparse_block_size", arguments["block_sparse_block_size"], 1)
        check_integer("block_sparse_num_local_blocks", arguments["block_sparse_num_local_blocks"], 0)
        check_integer("block_sparse_vertical_stride", arguments["block_sparse_vertical_stride"], 1)
    return mask


def _check_position(arguments: Mapping[str, Any]) -> str:
    position = check_member("position_embedding_type", arguments["position_embedding_type"], POSITIONS)
    if position in ("chatglm", "mrope"):
        raise NotImplementedError(f"gpt_attention does not support position_embedding_type {position}: use another.")
    return position


def _check_mode(arguments: Mapping[str, Any]) -> int:
    value = check_integer("kv_cache_quant_mode", arguments["kv_cache_quant_mode"])
    mode = value & (INT8 | FP8)
    if mode == INT8 | FP8:
        refuse(
            "gpt_attention.conflicting_cache_dtypes",
            f"kv_cache_quant_mode is {value}, which selects both int8 and float8_e4m3fn",
            f"use {INT8} for int8, {FP8} for float8_e4m3fn, or 0 for the type of qkv",
        )
    return mode


def _reject_cache_arguments(arguments: Mapping[str, Any], mode: int) -> None:
    for name in _CACHE_ARGUMENTS:
        if arguments[name] is not None:
            refuse(
                "gpt_attention.cache_argument_without_cache",
                f"use_cache is False, and {name} is given",
                f"leave out {name}, or set use_cache to True",
            )
    if mode:
        refuse(
            "gpt_attention.quantization_without_cache",
            f"use_cache is False, and kv_cache_quant_mode {arguments['kv_cache_quant_mode']} requires a cache",
            "set kv_cache_quant_mode to 0, or use_cache to True",
        )


def _check_cross(arguments: Mapping[str, Any], position: str) -> None:
    reason = "do_cross_attention is True, and keys of an encoder have no"
    if position.startswith("alibi"):
        refuse(
            "gpt_attention.alibi_in_cross_attention",
            f"position_embedding_type is {position}, {reason} ALiBi",
            "use learned_absolute",
        )
    if arguments["relative_attention_bias"] is not None:
        refuse(
            "gpt_attention.bias_in_cross_attention",
            f"relative_attention_bias is given, {reason} relative bias",
            "leave it out",
        )
    if arguments["streamingllm"]:
        refuse(
            "gpt_attention.streaming_in_cross_attention",
            f"streamingllm is True, {reason} window to shift",
            "set it to False",
        )


def _check_window(arguments: Mapping[str, Any]) -> None:
    name, sink_name = "host_max_attention_window_sizes", "host_sink_token_length"
    sinks, sizes = arguments[sink_name], arguments[name]
    if getattr(sinks, "ndim", 0):
        if check_array(sink_name, sinks, INTEGERS).shape != (1,):
            refuse(
                "gpt_attention.shape_mismatch",
                f"{sink_name} has the shape {sinks.shape}",
                "give one integer, or an array of shape (1,)",
            )
    elif sinks is not None:
        check_integer(sink_name, sinks, 0)
    if sizes is not None and (check_array(name, sizes, INTEGERS).ndim != 1 or not sizes.size):
        refuse(
            "gpt_attention.shape_mismatch",
            f"{name} has the shape {sizes.shape}",
            "give one size for each layer, or one for all, of shape (n,)",
        )


def _check_numbers(arguments: Mapping[str, Any]) -> None:
    check_number("q_scaling", arguments["q_scaling"], above=0)
    check_number("attn_logit_softcapping_scale", arguments["attn_logit_softcapping_scale"], minimum=0)
    ranks = check_integer("tp_size", arguments["tp_size"], 1)
    if check_integer("tp_rank", arguments["tp_rank"], 0) >= ranks:
        refuse(
            "gpt_attention.rank_out_of_range",
            f"tp_rank is {arguments['tp_rank']}, and tp_size {ranks}",
            "count ranks from 0 to tp_size - 1",
        )
    splits = arguments["multi_block_mode"]
    if splits is not None:
        check_integer("multi_block_mode", splits, 0)
