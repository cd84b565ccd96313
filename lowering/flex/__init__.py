"""Attention with user-defined scores and masks: score_mod and mask_mod are traced and compiled (docs/flex.md).

from lowering import flex
y = flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: 20 * flex.tanh(s / 20), mask_mod=flex.masks.causal)
"""

from __future__ import annotations

from . import masks, mods
from .attention import flex_attention
from .block_mask import BlockMask
from .captured import ArraySpec
from .create import create_block_mask
from .kernel_cache import CacheInfo, cache_clear, cache_info
from .mask_picture import MaskPicture
from .masks import and_masks, or_masks
from .module import FlexModule, compile_flex, load
from .show import show
from .vocabulary import (
    abs,
    cast,
    ceil,
    clip,
    cos,
    exp,
    exp2,
    floor,
    log,
    log2,
    logical_and,
    logical_not,
    logical_or,
    maximum,
    minimum,
    sigmoid,
    sin,
    sqrt,
    tan,
    tanh,
    where,
)

__all__ = [
    "ArraySpec", "BlockMask", "CacheInfo", "FlexModule", "MaskPicture", "abs", "and_masks", "cache_clear",
    "cache_info", "cast", "ceil", "clip", "compile_flex", "cos", "create_block_mask", "exp", "exp2", "flex_attention",
    "floor", "load", "log", "log2", "logical_and", "logical_not", "logical_or", "masks", "maximum", "minimum", "mods",
    "or_masks", "show", "sigmoid", "sin", "sqrt", "tan", "tanh", "where",
]  # fmt: skip
