"""What gpt_attention is asked for beside its arrays: sizes, types, masks, windows, and what does not go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...ops.tensorrt_llm.settings import MASKS, POSITIONS
from .rotation import Rotation, rotation_of
from .values import INTEGERS, array, flag, integer, member, number, refuse

INT8, FP8 = 64, 128  # flags of kv_cache_quant_mode; its other bits mean nothing here

_FLAGS = (
    "do_cross_attention", "use_cache", "streamingllm", "use_one_more_block", "use_fp8_context_fmha",
    "attend_current_unquantized", "trt_mmha_compat", "relative_attention_bidirectional",
    "block_sparse_homo_head_pattern",
)  # fmt: skip
_OF_CACHES = (
    "past_key_value", "host_kv_cache_pool_pointers", "kv_cache_block_offsets", "host_kv_cache_block_offsets",
    "host_kv_cache_pool_mapping", "cache_indirection",
)  # fmt: skip
# by how names begin, with the values of TensorRT-LLM that ask for nothing
_REFUSED = ("vision_", "spec_decoding_", "mrope_", "is_mla_enabled_flag", "cp_", "skip_attn")
_ASKING_NOTHING: dict[str, tuple[Any, ...]] = {
    "is_mla_enabled_flag": (False,), "cp_size": (1,), "cp_rank": (0,), "cp_group": (0, [0]),
    "spec_decoding_is_generation_length_variable": (False,), "spec_decoding_max_generation_length": (1,),
    "vision_start": (-1,), "vision_length": (-1,),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    heads: int
    kv_heads: int
    size: int  # hidden_size_per_head
    layer: int
    position: str
    mask: str
    rotation: Rotation | None
    cached: bool  # use_cache
    cross: bool
    streaming: bool
    compatible: bool  # trt_mmha_compat
    one_more_block: bool
    mode: int  # INT8, FP8 or 0
    window: int | None  # W of this layer; None: there is none, or it is ignored
    sinks: int
    max_distance: int
    bidirectional: bool  # relative_attention_bidirectional

    @property
    def queries(self) -> int:
        """Columns of Q."""
        return self.heads * self.size

    @property
    def keys(self) -> int:
        """Columns of K, and of V."""
        return self.kv_heads * self.size

    @property
    def columns(self) -> int:
        return self.queries + 2 * self.keys


def refuse_unknown(others: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for what TensorRT-LLM has and this function has not, TypeError for other names.

    others are the keyword arguments that are none of the function's own. Values that ask for nothing are passed over.
    """
    for name, value in others.items():
        if not name.startswith(_REFUSED):
            raise TypeError(f"gpt_attention() got an unexpected keyword argument '{name}'.")
        nothing = _ASKING_NOTHING.get(name, ())
        if value is not None and not any(type(value) is type(other) and value == other for other in nothing):
            raise NotImplementedError(f"gpt_attention does not support {name}: leave it out.")


def settings_of(arguments: Mapping[str, Any]) -> Settings:
    """Arrays of which the host reads a number are read here: the window and the number of sinks."""
    flags = {name: flag(name, arguments[name]) for name in _FLAGS}
    heads = integer("num_heads", arguments["num_heads"], 1)
    given = arguments["num_kv_heads"]
    kv_heads = heads if given is None else integer("num_kv_heads", given, 1)
    if heads % kv_heads:
        refuse(f"num_heads is {heads} and num_kv_heads {kv_heads}", "make num_heads a multiple of num_kv_heads")
    size = integer("hidden_size_per_head", arguments["hidden_size_per_head"], 1)
    cross, cached = flags["do_cross_attention"], flags["use_cache"]
    mask, position = _mask(arguments), _position(arguments)
    mode = _mode(arguments)
    if flags["use_fp8_context_fmha"] and mode != FP8:
        refuse(
            f"use_fp8_context_fmha needs a cache of float8_e4m3fn, and kv_cache_quant_mode is "
            f"{arguments['kv_cache_quant_mode']}",
            f"set kv_cache_quant_mode to {FP8}, or use_fp8_context_fmha to False",
        )
    if not cached:
        _no_cache(arguments, mode)
    if cross:
        _cross(arguments, position)
    layer = integer("layer_idx", arguments["layer_idx"], 0)
    window, sinks = _window(arguments, layer, cross)
    _numbers(arguments)
    return Settings(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        layer=layer,
        position=position,
        mask=mask,
        rotation=rotation_of(arguments, position, size),
        cached=cached,
        cross=cross,
        streaming=flags["streamingllm"],
        compatible=flags["trt_mmha_compat"],
        one_more_block=flags["use_one_more_block"],
        mode=mode,
        window=window,
        sinks=sinks,
        max_distance=integer("max_distance", arguments["max_distance"], 0),
        bidirectional=flags["relative_attention_bidirectional"],
    )


def _mask(arguments: Mapping[str, Any]) -> str:
    mask = member("mask_type", arguments["mask_type"], MASKS)
    if arguments["attention_mask"] is not None or arguments["attention_packed_mask"] is not None:
        return "custom_mask"
    if mask == "custom_mask":
        refuse("mask_type is custom_mask, and there is no mask", "give attention_mask or attention_packed_mask")
    if mask == "blocksparse":
        integer("block_sparse_block_size", arguments["block_sparse_block_size"], 1)
        integer("block_sparse_num_local_blocks", arguments["block_sparse_num_local_blocks"], 0)
        integer("block_sparse_vertical_stride", arguments["block_sparse_vertical_stride"], 1)
    return mask


def _position(arguments: Mapping[str, Any]) -> str:
    position = member("position_embedding_type", arguments["position_embedding_type"], POSITIONS)
    if position in ("chatglm", "mrope"):
        raise NotImplementedError(f"gpt_attention does not support position_embedding_type {position}: use another.")
    return position


def _mode(arguments: Mapping[str, Any]) -> int:
    given = integer("kv_cache_quant_mode", arguments["kv_cache_quant_mode"])
    mode = given & (INT8 | FP8)
    if mode == INT8 | FP8:
        refuse(
            f"kv_cache_quant_mode is {given}, which asks for int8 and for float8_e4m3fn at once",
            f"use {INT8} for int8, {FP8} for float8_e4m3fn, or 0 for the type of qkv",
        )
    return mode


def _no_cache(arguments: Mapping[str, Any], mode: int) -> None:
    for name in _OF_CACHES:
        if arguments[name] is not None:
            refuse(f"use_cache is False, and {name} is given", f"leave out {name}, or set use_cache to True")
    if mode:
        refuse(
            f"use_cache is False, and kv_cache_quant_mode {arguments['kv_cache_quant_mode']} asks for a cache",
            "set kv_cache_quant_mode to 0, or use_cache to True",
        )


def _cross(arguments: Mapping[str, Any], position: str) -> None:
    why = "do_cross_attention is True, and keys of an encoder have no"
    if position.startswith("alibi"):
        refuse(f"position_embedding_type is {position}, {why} ALiBi", "use learned_absolute")
    if arguments["relative_attention_bias"] is not None:
        refuse(f"relative_attention_bias is given, {why} relative bias", "leave it out")
    if arguments["streamingllm"]:
        refuse(f"streamingllm is True, {why} window to shift", "set it to False")


def _window(arguments: Mapping[str, Any], layer: int, cross: bool) -> tuple[int | None, int]:
    name, other = "host_max_attention_window_sizes", "host_sink_token_length"
    given, window, sinks = arguments[other], None, 0
    if given is not None:
        if getattr(given, "ndim", 0):
            length = array(other, given, INTEGERS)
            if length.shape != (1,):
                refuse(f"{other} has the shape {length.shape}", "give one integer, or an array of shape (1,)")
            given = length[0]
        sinks = integer(other, given, 0)
    sizes = arguments[name]
    if sizes is not None:
        if array(name, sizes, INTEGERS).ndim != 1 or not sizes.size:
            refuse(f"{name} has the shape {sizes.shape}", "give one size for each layer, or one for all, of shape (n,)")
        window = int(sizes[layer % len(sizes)])
    if cross:  # which ignores both
        return None, 0
    if window is not None and window < 1:
        refuse(f"{name} gives layer {layer} a window of {window} tokens", "make it at least 1, or leave it out")
    if window is not None and sinks >= window:
        refuse(
            f"{other} is {sinks}, and {name} gives layer {layer} a window of {window} tokens, sinks included",
            "make the window larger, or the sinks fewer",
        )
    return window, sinks


def _numbers(arguments: Mapping[str, Any]) -> None:
    number("q_scaling", arguments["q_scaling"], above=0)
    number("attn_logit_softcapping_scale", arguments["attn_logit_softcapping_scale"], least=0)
    ranks = integer("tp_size", arguments["tp_size"], 1)
    if integer("tp_rank", arguments["tp_rank"], 0) >= ranks:
        refuse(f"tp_rank is {arguments['tp_rank']}, and tp_size {ranks}", "count ranks from 0 to tp_size - 1")
    splits = arguments["multi_block_mode"]
    if splits is not None:
        integer("multi_block_mode", splits, 0)
