"""The properties that all calls of an attack on OpenPPL's operators share, and tables of inputs and attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.serving.cache_attention.cache_attention_cases import DEFAULTS, INPUTS

Tensors = Mapping[str, np.ndarray]

# Attributes and their defaults; num_heads and head_dim have none.
ATTRIBUTE_DEFAULTS: dict[str, dict[str, int]] = {
    operator: ({} if operator == "KeyValueCache" else {"num_heads": 0, "head_dim": 0}) | defaults
    for operator, defaults in DEFAULTS.items()
}

FLOATS = ("float32", "float16", "bfloat16")
KEYS = ("current_key", "current_value", "key", "value")
ROWS = ("query", *KEYS)
STARTS = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
MOST = ("max_seqlen", "max_kvlen")
NUMBERS = ("decoding_batches", *MOST)

# Axes of a cache by layout: slot of a token, layer, key or value, head, channel.
AXES = ("plkhd", "lpkhd", "lkphd", "lkhpd")


@dataclass(frozen=True)
class Form:
    """The properties that all calls of an attack share."""

    op: str
    attributes: dict[str, Any]
    heads: int
    kv_heads: int
    size: int
    types: dict[str, str]
    scale: str  # "absent", "stored", "empty", or "other": one that an unquantized cache does not need
    mask_rank: int  # 0 without a mask
    scalar_rank: int
    ranks: dict[str, int]  # of what is drawn with another one than it should have
    holes: frozenset[str]

    def said(self, name: str) -> Any:
        return self.attributes.get(name, ATTRIBUTE_DEFAULTS[self.op][name])

    def names(self) -> list[str]:
        there = {"scale": self.scale != "absent", "attn_mask": self.mask_rank > 0}
        return [name for name in INPUTS[self.op] if there.get(name, True)]
