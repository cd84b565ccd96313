"""What written-out layer and RMS norms share: mean squares, their inverse roots, and scales behind them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .matching import Rewrite, attribute, dims, integers, is_op, number, only_reader, operand, pairs, producer


def mean_of(value: ir.Value) -> ir.Value | None:
    """x where the value is the mean of x over its last axis, which stays with size 1."""
    node = producer(value, "ReduceMean")
    if node is None:
        return None
    x = operand(node, 0)
    axes, rank = integers(node, 1, "axes"), len(dims(x))
    last = axes is not None and rank > 0 and [axis % rank for axis in axes] == [rank - 1]
    return x if last and attribute(node, "keepdims", 1) else None


def square_of(value: ir.Value) -> ir.Value | None:
    """x where the value is x^2, as a power or a matmul."""
    node = producer(value, "Pow", "Mul")
    if node is None:
        return None
    x, other = operand(node, 0), operand(node, 1)
    same = x is other if is_op(node, "Mul") else number(other) == 2
    return x if same and dims(x) == dims(value) else None


def divided(node: ir.Node) -> tuple[ir.Value, ir.Value, float] | None:
    """(d, x, epsilon) where the node computes d / sqrt(mean(x^2) + epsilon).

    1. Div by Sqrt. 2. Mul by Reciprocal(Sqrt), 1 / Sqrt or a Pow of -1/2.
    """
    if is_op(node, "Div"):
        candidates = [(operand(node, 0), _root(operand(node, 1), 0.5))]
    elif is_op(node, "Mul"):
        candidates = [(d, _root(inverse, -0.5)) for d, inverse in pairs(node)]
    else:
        return None
    for d, variance in candidates:
        add = producer(variance, "Add")
        for mean, epsilon in pairs(add) if add is not None else ():
            added, squares = number(epsilon), mean_of(mean)
            x = square_of(squares) if squares is not None else None
            if added is not None and added >= 0 and x is not None and len(dims(d)) == len(dims(node.outputs[0])):
                return d, x, added
    return None


def _root(value: ir.Value, power: float) -> ir.Value | None:
    """v where the value is v to the power of 1/2 or -1/2."""
    node = producer(value, "Sqrt", "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if is_op(node, "Sqrt"):
        return operand(node, 0) if power > 0 else None
    if is_op(node, "Reciprocal"):
        return _root(operand(node, 0), -power)
    if is_op(node, "Div"):
        return _root(operand(node, 1), -power) if number(operand(node, 0)) == 1 else None
    return operand(node, 0) if number(operand(node, 1)) == power else None


class Chain:
    """The nodes behind a normalized value, taken one after the other."""

    def __init__(self, node: ir.Node) -> None:
        self.nodes = [node]

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    def cast(self, dtype: ir.DataType | None) -> bool:
        """Takes a Cast to that type, if that alone reads the result."""
        node = only_reader(self.result, "Cast")
        if node is None or node.outputs[0].dtype != dtype:
            return False
        self.nodes.append(node)
        return True

    def parameter(self, operator: str) -> ir.Value | None:
        """Takes a Mul or Add with one number for each element of the last axis; returns the numbers."""
        node, result = only_reader(self.result, operator), self.result
        if node is None:
            return None
        for own, other in pairs(node):
            if own is result and dims(other) == dims(result)[-1:] and other.dtype == result.dtype:
                self.nodes.append(node)
                return other
        return None


def widened_from(value: ir.Value) -> ir.Value:
    """What a Cast to float32 widened: the norms compute in float32 anyway."""
    node = producer(value, "Cast")
    before = operand(node, 0) if node is not None and value.dtype == ir.DataType.FLOAT else value
    return before if before.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else value


def ones(new: Rewrite, size: int, dtype: ir.DataType) -> ir.Value:
    """A scale that changes nothing."""
    return new.constant(np.ones([size]), dtype)
