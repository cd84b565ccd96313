"""The root mean square norm, written out: one RMSNormalization node (https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import onnx_ir as ir

from .matching import Rewrite, dims
from .node_pass import NodePass
from .normalization import Chain, divided, ones, widened_from
from .opset import FIRST


class FuseRmsNormPass(NodePass):
    """Makes one RMSNormalization of x / sqrt(mean(x^2) + epsilon) * scale over the last axis.

    1. The square as Pow(x, 2) or Mul(x, x); the division as Div by Sqrt, or Mul by Reciprocal(Sqrt), 1 / Sqrt or a Pow.
    2. The scale on either side of its Mul; without one it is ones.
    3. x cast to float32 before and back before the scale: the node computes in float32 by itself and reads what was
       cast.

    Another axis, a mean without its axis, another x below the root, and float64 refuse the match; a factor that is no
    scale of the last axis stays a Mul.
    """

    since = FIRST

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(node: ir.Node) -> bool:
    found = divided(node)
    if found is None or found[0] is not found[1]:
        return False
    x, _, epsilon = found
    size, source, chain = dims(x)[-1], widened_from(x), Chain(node)
    if not isinstance(size, int) or x.dtype == ir.DataType.DOUBLE:
        return False
    if source is not x and not chain.cast(source.dtype):
        source = x
    scale = chain.parameter("Mul")
    result = chain.result
    new = Rewrite(chain.nodes[-1])
    assert result.dtype is not None
    scale = ones(new, size, result.dtype) if scale is None else scale
    attributes = {"axis": -1, "epsilon": epsilon}
    new.replace(
        chain.nodes, result, new.emit("RMSNormalization", [source, scale], attributes, result.dtype, dims(result))
    )
    return True
