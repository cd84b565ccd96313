"""Fusion of a decomposed Swish, also called SiLU, into one Swish node (https://arxiv.org/abs/1710.05941)."""

from __future__ import annotations

import onnx_ir as ir

from ..graph.rewriting.matching import Rewrite, dims, only_reader, operand, operand_orders, producer, read_number
from ..graph.rewriting.opset import TARGET_OPSET
from .node_pass import NodePass
from .polynomial import read_polynomial


class FuseSwishPass(NodePass):
    """Fusion of x Sigmoid(alpha x) into one Swish.

    1. alpha is 1: the Sigmoid reads x itself.
    2. alpha is a constant factor of x, as in the quick Gelu of CLIP (1.702).

    The match is rejected for another x inside than outside, and for a Sigmoid that another node reads.
    """

    since = TARGET_OPSET
    operators = ("Sigmoid",)

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(sigmoid: ir.Node) -> bool:
    multiply = only_reader(sigmoid.outputs[0], "Mul")
    if multiply is None:
        return False
    x = next(other for own, other in operand_orders(multiply) if own is sigmoid.outputs[0])
    inner = read_polynomial(operand(sigmoid, 0), x)
    if read_number(x) is not None or inner is None or any(c for k, c in inner.items() if k != 1):
        return False
    new, result = Rewrite(multiply), multiply.outputs[0]
    alpha = inner.get(1, 0.0)
    attributes = {} if alpha == 1.0 else {"alpha": alpha}
    inside = producer(operand(sigmoid, 0), "Mul", "Div")
    nodes = [sigmoid, multiply] if inside is None or operand(sigmoid, 0) is x else [inside, sigmoid, multiply]
    new.replace(nodes, result, new.emit("Swish", [x], attributes, shape=dims(result)))
    return True
