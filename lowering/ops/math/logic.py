"""Comparisons and logic: ONNX Equal, Less, And, Not and similar operators (opset 7 and later)."""

from __future__ import annotations

from tvm import relax

from ...importing.node import Node
from ...importing.values import Value
from .. import op
from ..helpers import symbolic
from ..helpers.compute import relax_call
from ..helpers.relax_operators import register_relax_operator


@op("Equal", since=7)
def equal(node: Node, a: Value, b: Value) -> Value:
    if a.dtype == "string":  # equal strings have equal ids
        a, b = (Value("int32", v.shape, node.tensor(v)) for v in (a, b))
    if a.dtype == "bool":  # LLVM cannot compare bools
        return not_(node, xor(node, a, b))
    folded = symbolic.elementwise(node, symbolic.equal, a, b, dtype="bool")
    return folded or relax_call(node, relax.op.equal, a, b, dtype="bool")


less = register_relax_operator("Less", 7, relax.op.less, symbolic.less, dtype="bool")
less_or_equal = register_relax_operator("LessOrEqual", 12, relax.op.less_equal, symbolic.less_or_equal, dtype="bool")
and_ = register_relax_operator("And", 7, relax.op.logical_and, symbolic.logical_and)
or_ = register_relax_operator("Or", 7, relax.op.logical_or, symbolic.logical_or)
xor = register_relax_operator("Xor", 7, relax.op.logical_xor, symbolic.logical_xor)
not_ = register_relax_operator("Not", 1, relax.op.logical_not, symbolic.logical_not)


@op("Greater", since=7)
def greater(node: Node, a: Value, b: Value) -> Value:
    return less(node, b, a)


@op("GreaterOrEqual", since=12)
def greater_or_equal(node: Node, a: Value, b: Value) -> Value:
    return less_or_equal(node, b, a)
