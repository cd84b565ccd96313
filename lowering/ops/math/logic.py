"""Comparisons and logic: ONNX Equal, Less, And, Not and similar operators (opset 7 and later)."""

from __future__ import annotations

from tvm import relax

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers import symbolic
from ..helpers.compute import relax_call


@op("Equal", since=7)
def equal(node: Node, a: Value, b: Value) -> Value:
    if a.dtype == "string":  # equal strings have equal ids
        a, b = (Value("int32", v.shape, node.tensor(v)) for v in (a, b))
    if a.dtype == "bool":  # LLVM cannot compare bools
        return not_(node, xor(node, a, b))
    folded = symbolic.elementwise(node, symbolic.equal, a, b, dtype="bool")
    return folded or relax_call(node, relax.op.equal, a, b, dtype="bool")


@op("Less", since=7)
def less(node: Node, a: Value, b: Value) -> Value:
    folded = symbolic.elementwise(node, symbolic.less, a, b, dtype="bool")
    return folded or relax_call(node, relax.op.less, a, b, dtype="bool")


@op("LessOrEqual", since=12)
def less_or_equal(node: Node, a: Value, b: Value) -> Value:
    folded = symbolic.elementwise(node, symbolic.less_or_equal, a, b, dtype="bool")
    return folded or relax_call(node, relax.op.less_equal, a, b, dtype="bool")


@op("Greater", since=7)
def greater(node: Node, a: Value, b: Value) -> Value:
    return less(node, b, a)


@op("GreaterOrEqual", since=12)
def greater_or_equal(node: Node, a: Value, b: Value) -> Value:
    return less_or_equal(node, b, a)


@op("And", since=7)
def and_(node: Node, a: Value, b: Value) -> Value:
    return symbolic.elementwise(node, symbolic.logical_and, a, b) or relax_call(node, relax.op.logical_and, a, b)


@op("Or", since=7)
def or_(node: Node, a: Value, b: Value) -> Value:
    return symbolic.elementwise(node, symbolic.logical_or, a, b) or relax_call(node, relax.op.logical_or, a, b)


@op("Xor", since=7)
def xor(node: Node, a: Value, b: Value) -> Value:
    return symbolic.elementwise(node, symbolic.logical_xor, a, b) or relax_call(node, relax.op.logical_xor, a, b)


@op("Not", since=1)
def not_(node: Node, x: Value) -> Value:
    return symbolic.elementwise(node, symbolic.logical_not, x) or relax_call(node, relax.op.logical_not, x)
