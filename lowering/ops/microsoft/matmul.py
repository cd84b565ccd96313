"""com.microsoft FusedMatMul and its older name TransposeMatMul."""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers.compute import relax_call
from ..math.matmul import emit_matmul, permute_axes, round_to
from . import DOMAIN


@op("TransposeMatMul", since=1, domain=DOMAIN)
@op("FusedMatMul", since=1, domain=DOMAIN)
def fused_matmul(node: Node, a: Value, b: Value) -> Value:
    """Return alpha A' B', rounded once, for A' and B' with transposed axes."""
    y = emit_matmul(node, _transpose(node, a, "A"), _transpose(node, b, "B"))
    alpha = node.attr("alpha", 1.0)
    if alpha != 1.0:
        y = relax_call(node, relax.op.multiply, y, node.constant(np.array(alpha, y.dtype)))
    return round_to(node, y, a.dtype)


def _transpose(node: Node, x: Value, name: str) -> Value:
    """Transpose the axes: transBatch moves the first axis after all other batch axes, trans then swaps the last two."""
    axes = list(range(x.rank))
    if x.rank < 2:
        return x
    if node.attr(f"transBatch{name}", 0):
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if node.attr(f"trans{name}", 0):
        axes[-2:] = axes[:-3:-1]
    return permute_axes(node, x, axes)
