"""Guard float expressions that TVM 0.27 simplifies as if they were real numbers against its simplifier.

It simplifies x - x, y - (x + y) and min(x, y) - y, turns x == x into true, and not (x < y) into y <= x. All are wrong
for NaN, for infinity, or after rounding. Constant zeros are hidden when operators are legalized: x * 0 is NaN if x is
not finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, te, tirx
from tvm.ir import prim

_COMPARED = (prim.LT, prim.LE, prim.GT, prim.GE, prim.EQ, prim.NE)


def guard_float_arithmetic(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with float expressions in a form that the simplifier does not change."""
    mod = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            guarded = tvm_ffi.structural_map(
                func,
                [
                    (prim.Sub, _guard_subtraction),
                    (prim.EQ, _guard_equal),
                    (prim.NE, _guard_not_equal),
                    (prim.Not, _guard_not),
                ],
            )
            if not guarded.same_as(func):
                mod.update_func(name, guarded)
    return mod


def _guard_subtraction(node: prim.Sub) -> ir.Expr:
    """Return a + b * -1 for a - b if one contains the other."""
    a, b = node.a, node.b
    pairs = itertools.product([a, *_get_operands(a)], [b, *_get_operands(b)])
    if not _is_float(node) or not any(prim.expr_deep_equal(*pair) for pair in pairs):
        return node
    return prim.Add(a, prim.Mul(b, tirx.const(-1.0, str(b.ty.dtype))))


def _get_operands(expr: ir.Expr) -> list[ir.Expr]:
    """Return the operands of a sum, a minimum or a maximum; a selection may be written as one of the latter."""
    if isinstance(expr, prim.Select):
        return [expr.true_value, expr.false_value]
    return [expr.a, expr.b] if isinstance(expr, (prim.Add, prim.Min, prim.Max)) else []


def _guard_equal(node: prim.EQ) -> ir.Expr:
    return prim.LE(node.a, node.b) if _has_equal_operands(node) else node


def _guard_not_equal(node: prim.NE) -> ir.Expr:
    return _hide_not(prim.LE(node.a, node.b)) if _has_equal_operands(node) else node


def _has_equal_operands(node: prim.EQ | prim.NE) -> bool:
    return _is_float(node.a) and bool(prim.expr_deep_equal(node.a, node.b))


def _guard_not(node: prim.Not) -> ir.Expr:
    """Hide a negation of truth values that floats decide."""
    results: list[bool] = []
    tvm_ffi.structural_walk(
        node.a, [(kind, lambda comparison: results.append(_is_float(comparison.a))) for kind in _COMPARED]
    )
    return _hide_not(node.a) if any(results) else node


def _hide_not(condition: ir.Expr) -> ir.Expr:
    dtype = str(condition.ty.dtype).replace("bool", "int32")  # same number of lanes
    one = tirx.const(1, dtype)
    return prim.LT(tirx.bitwise_and(condition.astype(dtype), one), one)


def _is_float(expr: ir.Expr) -> bool:
    return "float" in str(expr.ty.dtype)


def legalize_with_hidden_zeros(operator: str) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """Return the legalization of relax's add, multiply, subtract or divide: the default, except for zero operands."""
    kind = {"add": prim.Add, "multiply": prim.Mul, "subtract": prim.Sub, "divide": prim.Div}[operator]
    default = ir.Op.get(f"relax.{operator}").get_attr("FLegalize")

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        zeros = [_hide_zero(argument) for argument in call.args]
        if all(zero is None for zero in zeros):
            return default(builder, call)

        def compute(*tensors: te.Tensor) -> te.Tensor:
            def element(*index: Any) -> ir.Expr:
                remaining = iter(tensors)
                return kind(*(next(remaining)(*index) if zero is None else zero for zero in zeros))

            return te.compute(tensors[0].shape, element, name=f"T_{operator}")

        tensors = [argument for argument, zero in zip(call.args, zeros) if zero is None]
        return builder.call_te(compute, *tensors, primfunc_name_hint=operator) if tensors else default(builder, call)

    return legalize


def _hide_zero(argument: relax.Expr) -> ir.Expr | None:
    """Return the number of a constant scalar that is zero, hidden from simplifiers; None for other arguments."""
    if not isinstance(argument, ir.GenericConst) or argument.value.numpy().ndim or not _is_float(argument):
        return None
    value = float(argument.value.numpy())
    if value != 0:
        return None
    zero = tirx.reinterpret("float32", tirx.const(1 << 31, "uint32"))  # -0, as TVM takes bits of 0 for a pointer
    if not np.signbit(value):
        zero = prim.Mul(zero, tirx.const(-1.0, "float32"))
    return zero.astype(str(argument.ty.dtype))


WITH_ZEROS = {
    f"relax.{operator}": legalize_with_hidden_zeros(operator) for operator in ("add", "multiply", "subtract", "divide")
}
"""Legalizations of these operators, by their names."""
