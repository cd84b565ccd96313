"""Fusion of a decomposed Gelu into one Gelu node (https://arxiv.org/abs/1606.08415)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from ..graph.rewriting.matching import Rewrite, dims, is_op, only_reader, operand, operand_orders, read_number
from .node_pass import NodePass
from .polynomial import Polynomial, has_equal_coefficients, multiply_polynomials, read_polynomial

_GELU_OPSET = 20

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


class FuseGeluPass(NodePass):
    """Fusion of x / 2 (1 + f(x)), in any order of its factors, into one Gelu.

    1. f = erf(x / sqrt(2)): approximate is none. The root as a divisor or a factor.
    2. f = tanh(sqrt(2 / pi) (x + 0.044715 x^3)): approximate is tanh. The cube as a Pow or as multiplications.

    The match is rejected for other constants, another x outside than inside, and a 1 + f(x) that another node reads.
    """

    since = _GELU_OPSET
    operators = (
        "Erf",
        "Tanh",
    )

    def rewrite(self, node: ir.Node) -> bool:
        return _try_fuse(node)


def _try_fuse(function: ir.Node) -> bool:
    add = only_reader(function.outputs[0], "Add")
    if add is None or not any(read_number(c) == 1 for _, c in operand_orders(add)):
        return False
    inner = {1: math.sqrt(0.5)} if is_op(function, "Erf") else {1: _SQRT_2_OVER_PI, 3: _SQRT_2_OVER_PI * 0.044715}
    nodes = [function, add]
    factors: list[ir.Value] = []  # the factors of 1 + f(x)
    while (multiply := only_reader(nodes[-1].outputs[0], "Mul")) is not None and len(factors) < 2:
        plus_one = nodes[-1].outputs[0]
        factors += [other for this, other in operand_orders(multiply) if this is plus_one][:1]
        nodes.append(multiply)
        result = multiply.outputs[0]
        for x in _list_variables(factors):
            outer: Polynomial | None = {0: 1.0}
            for value in factors:
                term = read_polynomial(value, x)
                outer = None if outer is None or term is None else multiply_polynomials(outer, term)
            if has_equal_coefficients(outer, {1: 0.5}, x.dtype) and has_equal_coefficients(
                read_polynomial(operand(function, 0), x), inner, x.dtype
            ):
                new = Rewrite(multiply)
                attributes = {"approximate": "tanh"} if is_op(function, "Tanh") else {}
                new.replace(nodes, result, new.emit("Gelu", [x], attributes, shape=dims(result)))
                return True
    return False


def _list_variables(factors: list[ir.Value]) -> Iterator[ir.Value]:
    """Yield the candidates for x: a factor, or a factor without its constant multiplier."""
    for value in factors:
        if read_number(value) is None:
            yield value
        node = value.producer()
        if is_op(node, "Mul", "Div"):
            assert node is not None
            yield from (x for x, c in operand_orders(node) if read_number(c) is not None)
