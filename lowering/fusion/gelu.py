"""Gelu, written out: one Gelu node (https://arxiv.org/abs/1606.08415)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from .matching import Rewrite, dims, is_op, number, only_reader, operand, pairs
from .node_pass import NodePass
from .polynomial import Polynomial, alike, polynomial, prod

_FIRST = 20  # Gelu

_ROOT = math.sqrt(2 / math.pi)


class FuseGeluPass(NodePass):
    """Makes one Gelu of x / 2 (1 + f(x)), in any order of its matmuls.

    1. f = erf(x / sqrt(2)): approximate is none. The root as a divisor or a factor.
    2. f = tanh(sqrt(2 / pi) (x + 0.044715 x^3)): approximate is tanh. The cube as a Pow or as matmuls.

    Other constants, another x outside than inside, and a 1 + f(x) that anybody else reads refuse the match.
    """

    since = _FIRST
    operators = (
        "Erf",
        "Tanh",
    )

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(function: ir.Node) -> bool:
    add = only_reader(function.outputs[0], "Add")
    if add is None or not any(number(c) == 1 for _, c in pairs(add)):
        return False
    inner = {1: math.sqrt(0.5)} if is_op(function, "Erf") else {1: _ROOT, 3: _ROOT * 0.044715}
    nodes = [function, add]
    factor: list[ir.Value] = []  # what 1 + f(x) is multiplied by
    while (multiply := only_reader(nodes[-1].outputs[0], "Mul")) is not None and len(factor) < 2:
        own = nodes[-1].outputs[0]
        factor += [other for this, other in pairs(multiply) if this is own][:1]
        nodes.append(multiply)
        result = multiply.outputs[0]
        for x in _variables(factor):
            outer: Polynomial | None = {0: 1.0}
            for value in factor:
                term = polynomial(value, x)
                outer = None if outer is None or term is None else prod(outer, term)
            if alike(outer, {1: 0.5}, x.dtype) and alike(polynomial(operand(function, 0), x), inner, x.dtype):
                new = Rewrite(multiply)
                attributes = {"approximate": "tanh"} if is_op(function, "Tanh") else {}
                new.replace(nodes, result, new.emit("Gelu", [x], attributes, shape=dims(result)))
                return True
    return False


def _variables(factor: list[ir.Value]) -> Iterator[ir.Value]:
    """What x may be: a factor, or a factor without the number it is multiplied by."""
    for value in factor:
        if number(value) is None:
            yield value
        node = value.producer()
        if is_op(node, "Mul", "Div"):
            assert node is not None
            yield from (x for x, c in pairs(node) if number(c) is not None)
