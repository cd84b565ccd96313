"""The attributes of a GptAttention, read and checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ...attention.record.cache_layout import QuantizedType
from ...attention.record.problem import MAX_SPLITS
from ...importing.node import Node
from ..helpers.requirements import read_choice, require_range

POSITIONS = (
    "learned_absolute", "rope_gptj", "rope_gpt_neox", "long_rope", "alibi", "alibi_with_scale", "relative", "chatglm",
    "yarn", "mrope",
)  # fmt: skip
SCALINGS = ("none", "linear", "dynamic", "longrope", "llama3", "yarn", "mrope")
MASKS = (
    "padding",
    "causal",
    "sliding_window_causal",
    "bidirectional",
    "bidirectionalglm",
    "blocksparse",
    "custom_mask",
)

_ROTARY_POSITIONS = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn")
_IMPLIED = {"long_rope": "longrope", "yarn": "yarn"}
_QUANTIZED_DTYPES: dict[int, QuantizedType] = {64: "int8", 128: "float8_e4m3fn"}


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotation of the first `dim` elements of each head; `scaling` is one of SCALINGS."""

    dim: int
    scaling: str
    original: int  # longrope: longer sequences use the long factors and tables


@dataclass(frozen=True, kw_only=True)
class RotarySettings(Rotation):
    """All settings of the rotation; config is the dictionary of Hugging Face."""

    is_interleaved: bool
    base: float
    scale: float
    max_positions: int
    m_scales: tuple[float, float]  # longrope: factors for short and for long sequences
    config: dict[str, Any]


@dataclass(frozen=True)
class BlockSparse:
    """The pattern of mask type blocksparse."""

    size: int
    is_homogeneous: bool
    local: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What the operator and the function of that name both know of a call, without its arrays."""

    heads: int
    kv_heads: int
    size: int  # hidden_size_per_head
    rotary: Rotation | None
    mask: str
    max_distance: int
    is_bidirectional: bool  # relative_attention_bidirectional
    layer: int
    has_cache: bool  # use_cache
    is_cross: bool
    is_streaming: bool
    has_spare_block: bool
    is_trt_compatible: bool  # trt_mmha_compat

    @property
    def width(self) -> int:
        """Return the number of columns of qkv with keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.size


@dataclass(frozen=True, kw_only=True)
class GptSettings(CommonSettings):
    """All attributes; quantized_dtype is the type of a quantized cache, or None."""

    rotary: RotarySettings | None
    scale: float
    softcap: float
    alibi: float | None  # factor of the slopes
    sparse: BlockSparse
    tp_size: int
    tp_rank: int
    quantized_dtype: QuantizedType | None
    has_fp8_context: bool
    attends_unquantized: bool  # attend_current_unquantized
    splits: int | None  # multi_block_mode


def read_settings(node: Node) -> GptSettings:
    """Read the attributes.

    Raises:
        NodeError: a value is illegal or unsupported.
    """
    heads, size = node.attr("num_heads"), node.attr("hidden_size_per_head")
    kv_heads = node.attr("num_kv_heads", 0) or heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads or size < 1:
        raise node.error(
            "gpt_attention.heads_not_divisible",
            f"attribute num_kv_heads is {kv_heads}, for num_heads = {heads} of hidden_size_per_head = {size}.",
            "Choose num_heads as a multiple of num_kv_heads.",
        )
    scale, softcap = _read_scaling(node, size)
    positions = _read_enumeration(node, "position_embedding_type", POSITIONS, 0, unsupported=("chatglm", "mrope"))
    flags = _read_quantization_flags(node)
    cross = _read_flag(node, "do_cross_attention", 0)
    if cross and positions.startswith("alibi"):
        raise node.error(
            "gpt_attention.alibi_unsupported",
            "attribute do_cross_attention is 1, and position_embedding_type is ALiBi.",
            "Use another position embedding.",
        )
    fp8_context = _read_flag(node, "use_fp8_context_fmha", 0)
    if fp8_context and flags != ["float8_e4m3fn"]:
        raise node.error(
            "gpt_attention.fp8_context_unsupported",
            f"attribute use_fp8_context_fmha is 1, and kv_cache_quant_mode is {node.attr('kv_cache_quant_mode', 0)}.",
            "Use kv_cache_quant_mode = 128.",
        )
    return GptSettings(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        scale=scale,
        softcap=softcap,
        rotary=_read_rotary(node, positions, size),
        alibi={"alibi": 1.0, "alibi_with_scale": scale}.get(positions),
        mask=_read_enumeration(node, "mask_type", MASKS, 1),
        sparse=_read_sparse(node),
        max_distance=_read_integer(node, "max_distance", 0, 0),
        is_bidirectional=_read_flag(node, "relative_attention_bidirectional", 0),
        layer=_read_integer(node, "layer_idx", 0, 0),
        tp_size=_read_integer(node, "tp_size", 1, 1),
        tp_rank=_read_rank(node),
        quantized_dtype=flags[0] if flags else None,
        has_cache=_read_flag(node, "use_cache", 1),
        is_cross=cross,
        is_streaming=_read_flag(node, "streamingllm", 0),
        has_spare_block=_read_flag(node, "use_one_more_block", 0),
        has_fp8_context=fp8_context,
        attends_unquantized=_read_flag(node, "attend_current_unquantized", 1),
        is_trt_compatible=_read_flag(node, "trt_mmha_compat", 0),
        splits=_read_splits(node),
    )


def _read_scaling(node: Node, size: int) -> tuple[float, float]:
    """Return the scale of the scores, and their cap or 0."""
    q_scaling, softcap = node.attr("q_scaling", 1.0), node.attr("attn_logit_softcapping_scale", 0.0)
    if not (q_scaling > 0 and math.isfinite(q_scaling)):
        raise node.error("node.value_out_of_range", f"attribute q_scaling is {q_scaling}.", "Use a positive number.")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise node.error(
            "node.value_out_of_range",
            f"attribute attn_logit_softcapping_scale is {softcap}.",
            "Use a positive cap, or 0 for none.",
        )
    return 1 / (q_scaling * math.sqrt(size)), softcap


def _read_quantization_flags(node: Node) -> list[QuantizedType]:
    """Return the dtype of a quantized cache in a list, which is empty if the cache is not quantized."""
    quant = node.attr("kv_cache_quant_mode", 0)
    flags = [dtype for flag, dtype in _QUANTIZED_DTYPES.items() if quant & flag]
    if len(flags) > 1:
        raise node.error(
            "gpt_attention.conflicting_quantization",
            f"attribute kv_cache_quant_mode is {quant}.",
            "Set flag 64 (int8) or 128 (fp8), not both.",
        )
    return flags


def _read_rotary(node: Node, positions: str, size: int) -> RotarySettings | None:
    dim = node.attr("rotary_embedding_dim", 0)
    scaling = _read_enumeration(node, "rotary_embedding_scale_type", SCALINGS, 0, unsupported=("mrope",))
    if dim < 0 or dim % 2 or dim > size:
        raise node.error(
            "gpt_attention.rotary_dim_unsupported",
            f"attribute rotary_embedding_dim is {dim}, for heads of {size}.",
            "Use an even number, at most the head size.",
        )
    if positions not in _ROTARY_POSITIONS or not dim:
        return None
    text = node.attr("rope_scaling_config", "")
    text = text.decode() if isinstance(text, bytes) else text
    try:
        config = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise node.error(
            "gpt_attention.rope_config_invalid",
            f"attribute rope_scaling_config is not JSON: {error}.",
            "Write a JSON object.",
        ) from error
    if not isinstance(config, dict):
        raise node.error(
            "gpt_attention.rope_config_invalid", f"attribute rope_scaling_config is {text}.", "Write a JSON object."
        )
    max_positions = _read_integer(node, "rotary_embedding_max_positions", 1024, 1)
    original = _read_integer(node, "rotary_embedding_original_max_positions", 1024, 1)
    default = (
        math.sqrt(1 + math.log(max_positions / original) / math.log(original)) if max_positions > original > 1 else 1.0
    )
    names = ("rotary_embedding_short_m_scale", "rotary_embedding_long_m_scale")
    short_scale, long_scale = (node.attr(name, None) for name in names)
    return RotarySettings(
        dim=dim,
        is_interleaved=positions == "rope_gptj",
        base=node.attr("rotary_embedding_base", 10000.0),
        scaling=_IMPLIED.get(positions, scaling),
        scale=node.attr("rotary_embedding_scale", 1.0),
        max_positions=max_positions,
        original=original,
        m_scales=(default if short_scale is None else short_scale, default if long_scale is None else long_scale),
        config=config,
    )


def _read_sparse(node: Node) -> BlockSparse:
    return BlockSparse(
        size=_read_integer(node, "block_sparse_block_size", 64, 1),
        is_homogeneous=_read_flag(node, "block_sparse_homo_head_pattern", 0),
        local=_read_integer(node, "block_sparse_num_local_blocks", 16, 0),
        stride=_read_integer(node, "block_sparse_vertical_stride", 8, 1),
    )


def _read_rank(node: Node) -> int:
    rank, size = _read_integer(node, "tp_rank", 0, 0), _read_integer(node, "tp_size", 1, 1)
    if rank >= size:
        raise node.error(
            "gpt_attention.rank_out_of_range",
            f"attribute tp_rank is {rank}, and tp_size is {size}.",
            "Use 0 to tp_size - 1.",
        )
    return rank


def _read_splits(node: Node) -> int | None:
    """Return the number of splits: -1 by size (None), 0 never (1), 1 always (2), more: this number."""
    mode = _read_integer(node, "multi_block_mode", -1, -1)
    require_range(node, "multi_block_mode", mode, -1, MAX_SPLITS)
    return {-1: None, 0: 1, 1: 2}.get(mode, mode)


def _read_enumeration(
    node: Node, name: str, values: tuple[str, ...], default: int, unsupported: tuple[str, ...] = ()
) -> str:
    value = node.attr(name, default)
    legal = [f"{n} ({text})" for n, text in enumerate(values) if text not in unsupported]
    if value not in range(len(values)) or values[value] in unsupported:
        raise node.error(
            "node.attribute_unsupported", f"attribute {name} is {value}.", f"Use one of {', '.join(legal)}."
        )
    return values[value]


def _read_flag(node: Node, name: str, default: int) -> bool:
    return bool(read_choice(node, name, default, (0, 1), code="node.value_out_of_range"))


def _read_integer(node: Node, name: str, default: int, minimum: int) -> int:
    return int(require_range(node, name, node.attr(name, default), minimum))
