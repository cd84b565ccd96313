"""What the attributes of a GptAttention say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from ...attention.cache_layout import CodeType
from ...attention.problem import MOST_SPLITS
from ...importing.node import Node

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

_ROTATED = ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn")
_IMPLIED = {"long_rope": "longrope", "yarn": "yarn"}
_CODES: dict[int, CodeType] = {64: "int8", 128: "float8_e4m3fn"}


@dataclass(frozen=True)
class RotarySettings:
    """The first dim elements of each head turn; `scaling` is one of SCALINGS, config the dictionary of Hugging Face."""

    dim: int
    interleaved: bool
    base: float
    scaling: str
    scale: float
    max_positions: int
    original: int
    m_scales: tuple[float, float]  # of longrope: short, long
    config: dict[str, Any]


@dataclass(frozen=True)
class BlockSparse:
    """The pattern of mask type blocksparse."""

    size: int
    homogeneous: bool
    local: int
    stride: int


@dataclass(frozen=True)
class Settings:
    """All of them; codes is the type of a quantized cache, or None."""

    heads: int
    kv_heads: int
    size: int
    scale: float
    softcap: float
    rotary: RotarySettings | None
    alibi: float | None  # what slopes are multiplied by
    mask: str
    sparse: BlockSparse
    max_distance: int
    bidirectional: bool  # relative_attention_bidirectional
    layer: int
    tp_size: int
    tp_rank: int
    codes: CodeType | None
    use_cache: bool
    cross: bool
    streaming: bool
    one_more_block: bool
    fp8_context: bool
    unquantized: bool  # attend_current_unquantized
    compatible: bool  # trt_mmha_compat
    splits: int | None  # multi_block_mode

    @property
    def width(self) -> int:
        """Columns of qkv with keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.size


def settings_of(node: Node) -> Settings:
    """Raises NodeError for a value that is illegal, or that names what is not supported."""
    heads, size = node.attr("num_heads"), node.attr("hidden_size_per_head")
    kv_heads = node.attr("num_kv_heads", 0) or heads
    if heads < 1 or kv_heads < 1 or heads % kv_heads or size < 1:
        raise node.error(
            f"attribute num_kv_heads is {kv_heads}, for num_heads = {heads} of hidden_size_per_head = {size}.",
            "Make num_heads a multiple of it.",
        )
    q_scaling, softcap = node.attr("q_scaling", 1.0), node.attr("attn_logit_softcapping_scale", 0.0)
    if not (q_scaling > 0 and math.isfinite(q_scaling)):
        raise node.error(f"attribute q_scaling is {q_scaling}.", "Use a positive number.")
    if not (softcap >= 0 and math.isfinite(softcap)):
        raise node.error(f"attribute attn_logit_softcapping_scale is {softcap}.", "Use a positive cap, or 0 for none.")
    scale = 1 / (q_scaling * math.sqrt(size))
    positions = _named(node, "position_embedding_type", POSITIONS, 0, refused=("chatglm", "mrope"))
    quant = node.attr("kv_cache_quant_mode", 0)
    flags = [dtype for flag, dtype in _CODES.items() if quant & flag]
    if len(flags) > 1:
        raise node.error(f"attribute kv_cache_quant_mode is {quant}.", "Set flag 64 (int8) or 128 (fp8), not both.")
    cross = _flag(node, "do_cross_attention", 0)
    if cross and positions.startswith("alibi"):
        raise node.error("attribute do_cross_attention is 1.", "It goes without ALiBi.")
    fp8_context = _flag(node, "use_fp8_context_fmha", 0)
    if fp8_context and flags != ["float8_e4m3fn"]:
        raise node.error("attribute use_fp8_context_fmha is 1.", "It needs kv_cache_quant_mode = 128.")
    return Settings(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        scale=scale,
        softcap=softcap,
        rotary=_rotary(node, positions, size),
        alibi={"alibi": 1.0, "alibi_with_scale": scale}.get(positions),
        mask=_named(node, "mask_type", MASKS, 1),
        sparse=_sparse(node),
        max_distance=_at_least(node, "max_distance", 0, 0),
        bidirectional=_flag(node, "relative_attention_bidirectional", 0),
        layer=_at_least(node, "layer_idx", 0, 0),
        tp_size=_at_least(node, "tp_size", 1, 1),
        tp_rank=_rank(node),
        codes=flags[0] if flags else None,
        use_cache=_flag(node, "use_cache", 1),
        cross=cross,
        streaming=_flag(node, "streamingllm", 0),
        one_more_block=_flag(node, "use_one_more_block", 0),
        fp8_context=fp8_context,
        unquantized=_flag(node, "attend_current_unquantized", 1),
        compatible=_flag(node, "trt_mmha_compat", 0),
        splits=_splits(node),
    )


def _rotary(node: Node, positions: str, size: int) -> RotarySettings | None:
    dim = node.attr("rotary_embedding_dim", 0)
    scaling = _named(node, "rotary_embedding_scale_type", SCALINGS, 0, refused=("mrope",))
    if dim < 0 or dim % 2 or dim > size:
        raise node.error(f"attribute rotary_embedding_dim is {dim}, for heads of {size}.", "Use an even number.")
    if positions not in _ROTATED or not dim:
        return None
    text = node.attr("rope_scaling_config", "")
    text = text.decode() if isinstance(text, bytes) else text
    try:
        config = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise node.error(f"attribute rope_scaling_config is no JSON: {error}.", "Write a dictionary.") from error
    if not isinstance(config, dict):
        raise node.error(f"attribute rope_scaling_config is {text}.", "Write a dictionary.")
    most = _at_least(node, "rotary_embedding_max_positions", 1024, 1)
    original = _at_least(node, "rotary_embedding_original_max_positions", 1024, 1)
    default = math.sqrt(1 + math.log(most / original) / math.log(original)) if most > original > 1 else 1.0
    names = ("rotary_embedding_short_m_scale", "rotary_embedding_long_m_scale")
    short, long = (node.attr(name, None) for name in names)
    return RotarySettings(
        dim=dim,
        interleaved=positions == "rope_gptj",
        base=node.attr("rotary_embedding_base", 10000.0),
        scaling=_IMPLIED.get(positions, scaling),
        scale=node.attr("rotary_embedding_scale", 1.0),
        max_positions=most,
        original=original,
        m_scales=(default if short is None else short, default if long is None else long),
        config=config,
    )


def _sparse(node: Node) -> BlockSparse:
    return BlockSparse(
        size=_at_least(node, "block_sparse_block_size", 64, 1),
        homogeneous=_flag(node, "block_sparse_homo_head_pattern", 0),
        local=_at_least(node, "block_sparse_num_local_blocks", 16, 0),
        stride=_at_least(node, "block_sparse_vertical_stride", 8, 1),
    )


def _rank(node: Node) -> int:
    rank, size = _at_least(node, "tp_rank", 0, 0), _at_least(node, "tp_size", 1, 1)
    if rank >= size:
        raise node.error(f"attribute tp_rank is {rank}, and tp_size {size}.", "Use 0 to tp_size - 1.")
    return rank


def _splits(node: Node) -> int | None:
    """-1: by size, 0: never, 1: always, more: so many."""
    mode = _at_least(node, "multi_block_mode", -1, -1)
    if mode > MOST_SPLITS:
        raise node.error(f"attribute multi_block_mode is {mode}.", f"Use {MOST_SPLITS} or less.")
    return {-1: None, 0: 1, 1: 2}.get(mode, mode)


def _named(node: Node, name: str, values: tuple[str, ...], default: int, refused: tuple[str, ...] = ()) -> str:
    value = node.attr(name, default)
    legal = [f"{n} ({text})" for n, text in enumerate(values) if text not in refused]
    if value not in range(len(values)) or values[value] in refused:
        raise node.error(f"attribute {name} is {value}.", f"Use one of {', '.join(legal)}.")
    return values[value]


def _flag(node: Node, name: str, default: int) -> bool:
    value = node.attr(name, default)
    if value not in (0, 1):
        raise node.error(f"attribute {name} is {value}.", "Use 0 or 1.")
    return bool(value)


def _at_least(node: Node, name: str, default: int, least: int) -> int:
    value = int(node.attr(name, default))
    if value < least:
        raise node.error(f"attribute {name} is {value}.", f"Use {least} or more.")
    return value
