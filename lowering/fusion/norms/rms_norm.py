"""Fusion of a decomposed RMS norm into one RMSNormalization node (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, dims
from ...graph.rewriting.opset import ATTENTION_OPSET
from ..node_pass import NodePass
from .normalization import ParameterChain, emit_ones, find_narrow_source, match_division


class FuseRmsNormPass(NodePass):
    """Fusion of x / sqrt(mean(x^2) + epsilon) * scale over the last axis into one RMSNormalization.

    1. The square as Pow(x, 2) or Mul(x, x); the division as Div by Sqrt, or Mul by Reciprocal(Sqrt), 1 / Sqrt or a Pow.
    2. The scale on either side of its Mul; without one it is ones.
    3. x cast to float32 before and back before the scale: the node computes in float32 by itself and reads the input of
       the Cast.

    The match is rejected for another axis, a mean without its axis, another x below the root, and float64. A factor
    that is not a scale of the last axis stays a Mul.
    """

    since = ATTENTION_OPSET

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(node: ir.Node) -> bool:
    normalized = match_division(node)
    if normalized is None or normalized[0] is not normalized[1]:
        return False
    x, _, epsilon = normalized
    size, source, chain = dims(x)[-1], find_narrow_source(x), ParameterChain(node)
    if not isinstance(size, int) or x.dtype == ir.DataType.DOUBLE:
        return False
    if source is not x and not chain.match_cast(source.dtype):
        source = x
    scale = chain.match_parameter("Mul")
    result = chain.result
    new = Rewrite(chain.nodes[-1])
    assert result.dtype is not None
    scale = emit_ones(new, size, result.dtype) if scale is None else scale
    attributes = {"axis": -1, "epsilon": epsilon}
    new.replace(
        chain.nodes, result, new.emit("RMSNormalization", [source, scale], attributes, result.dtype, dims(result))
    )
    return True
