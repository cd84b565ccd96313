"""The ONNX operator FlexAttention of the domain lowering.flex: the attributes of a node, without a compiler.

`lowering.flex` writes models of one such node, `lowering/ops/flex` lowers it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Record
from .expr.node import Expr

DOMAIN = "lowering.flex"

INPUTS = ("q", "k", "v", "block_states")
"""The inputs before the captured arrays; states of blocks may be missing."""

GRADIENT_INPUTS = (*INPUTS, "y", "lse", "dy")
"""The inputs of FlexAttentionGradient before the captured arrays."""

HIDDEN, PARTIAL, FULL = 0, 1, 2
"""States of a block: no pair is visible, the pairs that the mask shows are, all are."""


@dataclass(frozen=True)
class FlexAttentionSettings(Record):
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
