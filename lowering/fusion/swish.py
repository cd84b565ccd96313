"""Swish, also called SiLU, written out: one Swish node (https://arxiv.org/abs/1710.05941)."""

from __future__ import annotations

import onnx_ir as ir

from .matching import Rewrite, dims, number, only_reader, operand, pairs, producer
from .node_pass import NodePass
from .opset import TARGET
from .polynomial import polynomial


class FuseSwishPass(NodePass):
    """Makes one Swish of x Sigmoid(alpha x).

    1. alpha is 1: the Sigmoid reads x itself.
    2. alpha is a number by which x is multiplied, as in the quick Gelu of CLIP (1.702).

    Another x inside than outside, and a Sigmoid that anybody else reads refuse the match.
    """

    since = TARGET
    operators = ("Sigmoid",)

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(sigmoid: ir.Node) -> bool:
    multiply = only_reader(sigmoid.outputs[0], "Mul")
    if multiply is None:
        return False
    x = next(other for own, other in pairs(multiply) if own is sigmoid.outputs[0])
    inner = polynomial(operand(sigmoid, 0), x)
    if number(x) is not None or inner is None or any(c for k, c in inner.items() if k != 1):
        return False
    new, result = Rewrite(multiply), multiply.outputs[0]
    alpha = inner.get(1, 0.0)
    attributes = {} if alpha == 1.0 else {"alpha": alpha}
    inside = producer(operand(sigmoid, 0), "Mul", "Div")
    nodes = [sigmoid, multiply] if inside is None or operand(sigmoid, 0) is x else [inside, sigmoid, multiply]
    new.replace(nodes, result, new.emit("Swish", [x], attributes, shape=dims(result)))
    return True
