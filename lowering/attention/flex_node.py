"""The ONNX operator FlexAttention of the domain lowering.flex: the attributes of a node, without a compiler.

`lowering.flex` writes models of one such node, `lowering/ops/flex` lowers it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .expr.node import Expr

DOMAIN = "lowering.flex"

INPUTS = ("q", "k", "v", "block_states")
"""The inputs before the captured arrays; states of blocks may be missing."""

GRADIENT_INPUTS = (*INPUTS, "y", "lse", "dy")
"""The inputs of FlexAttentionGradient before the captured arrays."""

HIDDEN, PARTIAL, FULL = 0, 1, 2
"""States of a block: no pair is visible, the pairs that the mask shows are, all are."""


@dataclass(frozen=True)
class FlexAttentionSettings:
    """The attribute `settings`, as JSON.

    score is the new score over (b, h, i, j, s), mask whether a pair is visible, over (b, h, i, j); None stands for
    none. They read the arrays that follow the fixed inputs, in the order of captures, and their sizes, called
    `name.axis`. A negative index counts from the end. block_size is that of a block mask, in rows and keys.
    """

    scale: float
    score: Expr | None = None
    mask: Expr | None = None
    captures: tuple[str, ...] = ()
    block_size: tuple[int, int] | None = None

    def to_json(self) -> str:
        data: dict[str, Any] = {"scale": self.scale, "captures": self.captures, "block_size": self.block_size}
        for name, expr in (("score", self.score), ("mask", self.mask)):
            data[name] = None if expr is None else expr.to_data()
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> FlexAttentionSettings:
        data = json.loads(text)
        score, mask = (None if data[name] is None else Expr.from_data(data[name]) for name in ("score", "mask"))
        blocks = None if data["block_size"] is None else tuple(data["block_size"])
        return FlexAttentionSettings(data["scale"], score, mask, tuple(data["captures"]), blocks)
