"""Fusion of a decomposed layer norm into one LayerNormalization node (https://arxiv.org/abs/1607.06450)."""

from __future__ import annotations

import onnx_ir as ir

from ...graph.rewriting.matching import Rewrite, dims, is_widening_cast, operand, producer
from ..node_pass import NodePass
from .normalization import ParameterChain, emit_ones, find_narrow_source, match_division, match_mean

_LAYER_NORM_OPSET = 17


class FuseLayerNormPass(NodePass):
    """Fusion of d / sqrt(mean(d^2) + epsilon) * scale + bias into one LayerNormalization.

    d is x - mean(x), over the last axis.

    1. The square and the division in the forms of FuseRmsNormPass.
    2. Scale and bias on either side of their Mul and Add; without a scale it is ones, without a bias there is none.
    3. x cast to float32 before and back before the scale: the node computes in float32 by itself and reads the input of
       the Cast.
    4. The difference cast to a wider type, and back before the scale, as the tracing exporter does for half precision.

    The match is rejected for a difference from anything but the mean of the same x, another axis, and float64. A factor
    or a summand that is not a parameter of the last axis stays.
    """

    since = _LAYER_NORM_OPSET

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(node: ir.Node) -> bool:
    normalized = match_division(node)
    if normalized is None or normalized[0] is not normalized[1]:
        return False
    cast = producer(normalized[0], "Cast")
    difference = producer(normalized[0] if cast is None else operand(cast, 0), "Sub")
    if difference is None or match_mean(operand(difference, 1)) is not operand(difference, 0):
        return False
    x, epsilon, chain = operand(difference, 0), normalized[2], ParameterChain(node)
    size = dims(x)[-1]
    if not isinstance(size, int) or x.dtype == ir.DataType.DOUBLE:
        return False
    if cast is not None and not (is_widening_cast(cast) and chain.match_cast(x.dtype)):
        return False
    source = find_narrow_source(x)
    if source is not x and (cast is not None or not chain.match_cast(source.dtype)):
        source = x
    scale, bias = chain.match_parameter("Mul"), chain.match_parameter("Add")
    result = chain.result
    new = Rewrite(chain.nodes[-1])
    assert result.dtype is not None
    scale = emit_ones(new, size, result.dtype) if scale is None else scale
    inputs = [source, scale] if bias is None else [source, scale, bias]
    attributes = {"axis": -1, "epsilon": epsilon}
    new.replace(chain.nodes, result, new.emit("LayerNormalization", inputs, attributes, result.dtype, dims(result)))
    return True
