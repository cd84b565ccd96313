"""Helpers shared by the fusions of layer and RMS norms: mean squares, their inverse roots, and scales after them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...graph.rewriting.matching import (
    Rewrite,
    attribute,
    dims,
    is_op,
    only_reader,
    operand,
    operand_orders,
    producer,
    read_integers,
    read_number,
)


def match_mean(value: ir.Value) -> ir.Value | None:
    """Return x if the value is the mean of x over its last axis, which stays with size 1."""
    node = producer(value, "ReduceMean")
    if node is None:
        return None
    x = operand(node, 0)
    axes, rank = read_integers(node, 1, "axes"), len(dims(x))
    is_last = axes is not None and rank > 0 and [axis % rank for axis in axes] == [rank - 1]
    return x if is_last and attribute(node, "keepdims", 1) else None


def match_square(value: ir.Value) -> ir.Value | None:
    """Return x if the value is x^2, as a power or a multiplication."""
    node = producer(value, "Pow", "Mul")
    if node is None:
        return None
    x, other = operand(node, 0), operand(node, 1)
    is_square = x is other if is_op(node, "Mul") else read_number(other) == 2
    return x if is_square and dims(x) == dims(value) else None


def match_division(node: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """Return (d, x, epsilon) if the node computes d / sqrt(mean(x^2) + epsilon).

    1. Div by Sqrt. 2. Mul by Reciprocal(Sqrt), 1 / Sqrt or a Pow of -1/2.
    """
    if is_op(node, "Div"):
        candidates = [(operand(node, 0), _match_root(operand(node, 1), 0.5))]
    elif is_op(node, "Mul"):
        candidates = [(d, _match_root(inverse, -0.5)) for d, inverse in operand_orders(node)]
    else:
        return None
    for d, variance in candidates:
        add = producer(variance, "Add")
        for mean, epsilon in operand_orders(add) if add is not None else ():
            added, squares = read_number(epsilon), match_mean(mean)
            x = match_square(squares) if squares is not None else None
            if added is not None and added >= 0 and x is not None and len(dims(d)) == len(dims(node.outputs[0])):
                return d, x, added
    return None


def _match_root(value: ir.Value, power: float) -> ir.Value | None:
    """Return v if the value is v to the power of 1/2 or -1/2."""
    node = producer(value, "Sqrt", "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if is_op(node, "Sqrt"):
        return operand(node, 0) if power > 0 else None
    if is_op(node, "Reciprocal"):
        return _match_root(operand(node, 0), -power)
    if is_op(node, "Div"):
        return _match_root(operand(node, 1), -power) if read_number(operand(node, 0)) == 1 else None
    return operand(node, 0) if read_number(operand(node, 1)) == power else None


class ParameterChain:
    """The nodes after a normalized value, matched one after the other."""

    def __init__(self, node: ir.Node) -> None:
        self.nodes = [node]

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    def match_cast(self, dtype: ir.DataType | None) -> bool:
        """Match a Cast to that type, if it alone reads the result."""
        node = only_reader(self.result, "Cast")
        if node is None or node.outputs[0].dtype != dtype:
            return False
        self.nodes.append(node)
        return True

    def match_parameter(self, operator: str) -> ir.Value | None:
        """Match a Mul or Add with one number for each element of the last axis; return the numbers."""
        node, result = only_reader(self.result, operator), self.result
        if node is None:
            return None
        for own, other in operand_orders(node):
            if own is result and dims(other) == dims(result)[-1:] and other.dtype == result.dtype:
                self.nodes.append(node)
                return other
        return None


def find_narrow_source(value: ir.Value) -> ir.Value:
    """Return the input of a Cast to float32: the norms compute in float32 anyway."""
    node = producer(value, "Cast")
    source = operand(node, 0) if node is not None and value.dtype == ir.DataType.FLOAT else value
    return source if source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else value


def emit_ones(new: Rewrite, size: int, dtype: ir.DataType) -> ir.Value:
    """Emit a scale of ones."""
    return new.emit_constant(np.ones([size]), dtype)
