"""The layer norm, written out: one LayerNormalization node (https://arxiv.org/abs/1607.06450)."""

from __future__ import annotations

import onnx_ir as ir

from .matching import Rewrite, dims, operand, producer, widens
from .node_pass import NodePass
from .normalization import Chain, divided, mean_of, ones, widened_from

_FIRST = 17  # LayerNormalization


class FuseLayerNormPass(NodePass):
    """Makes one LayerNormalization of d / sqrt(mean(d^2) + epsilon) * scale + bias with d = x - mean(x), last axis.

    1. The square and the division in the ways of FuseRmsNormPass.
    2. Scale and bias on either side of their Mul and Add; without a scale it is ones, without a bias there is none.
    3. x cast to float32 before and back before the scale: the node computes in float32 by itself and reads what was
       cast.
    4. The difference cast to a wider type, and back before the scale, as the tracing exporter does for half precision.

    A difference from anything but the mean of the same x, another axis, and float64 refuse the match; a factor or a
    summand that is no parameter of the last axis stays.
    """

    since = _FIRST

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(node: ir.Node) -> bool:
    found = divided(node)
    if found is None or found[0] is not found[1]:
        return False
    cast = producer(found[0], "Cast")
    difference = producer(found[0] if cast is None else operand(cast, 0), "Sub")
    if difference is None or mean_of(operand(difference, 1)) is not operand(difference, 0):
        return False
    x, epsilon, chain = operand(difference, 0), found[2], Chain(node)
    size = dims(x)[-1]
    if not isinstance(size, int) or x.dtype == ir.DataType.DOUBLE:
        return False
    if cast is not None and not (widens(cast) and chain.cast(x.dtype)):
        return False
    source = widened_from(x)
    if source is not x and (cast is not None or not chain.cast(source.dtype)):
        source = x
    scale, bias = chain.parameter("Mul"), chain.parameter("Add")
    result = chain.result
    new = Rewrite(chain.nodes[-1])
    assert result.dtype is not None
    scale = ones(new, size, result.dtype) if scale is None else scale
    inputs = [source, scale] if bias is None else [source, scale, bias]
    attributes = {"axis": -1, "epsilon": epsilon}
    new.replace(chain.nodes, result, new.emit("LayerNormalization", inputs, attributes, result.dtype, dims(result)))
    return True
