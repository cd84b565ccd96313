"""Float expressions that TVM 0.27 simplifies as if numbers were real are held back from its simplifier.

It makes x - x, y - (x + y) and min(x, y) - y shorter, x == x true, and of not (x < y) y <= x, which is wrong of NaN, of
infinity, and of what is rounded. Constant zeros are hidden where operators are written out: x * 0 is NaN where x is not
finite.
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
    """Return the module with float expressions in a form that the simplifier leaves alone."""
    mod = mod.clone()
    for name, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            held = tvm_ffi.structural_map(
                func, [(prim.Sub, _subtract), (prim.EQ, _equal), (prim.NE, _unequal), (prim.Not, _not)]
            )
            if not held.same_as(func):
                mod.update_func(name, held)
    return mod


def _subtract(node: prim.Sub) -> ir.Expr:
    """a + b * -1 in place of a - b where one has the other in it."""
    a, b = node.a, node.b
    pairs = itertools.product([a, *_terms(a)], [b, *_terms(b)])
    if not _is_float(node) or not any(prim.expr_deep_equal(*pair) for pair in pairs):
        return node
    return prim.Add(a, prim.Mul(b, tirx.const(-1.0, str(b.ty.dtype))))


def _terms(expr: ir.Expr) -> list[ir.Expr]:
    """What a sum, or the smaller or larger of two, is made of; a choice may be written as one of the latter."""
    if isinstance(expr, prim.Select):
        return [expr.true_value, expr.false_value]
    return [expr.a, expr.b] if isinstance(expr, (prim.Add, prim.Min, prim.Max)) else []


def _equal(node: prim.EQ) -> ir.Expr:
    return prim.LE(node.a, node.b) if _compares_with_itself(node) else node


def _unequal(node: prim.NE) -> ir.Expr:
    return _hidden_not(prim.LE(node.a, node.b)) if _compares_with_itself(node) else node


def _compares_with_itself(node: prim.EQ | prim.NE) -> bool:
    return _is_float(node.a) and bool(prim.expr_deep_equal(node.a, node.b))


def _not(node: prim.Not) -> ir.Expr:
    """Of truth values that floats decide."""
    found: list[bool] = []
    tvm_ffi.structural_walk(node.a, [(kind, lambda part: found.append(_is_float(part.a))) for kind in _COMPARED])
    return _hidden_not(node.a) if any(found) else node


def _hidden_not(condition: ir.Expr) -> ir.Expr:
    dtype = str(condition.ty.dtype).replace("bool", "int32")  # of as many lanes
    one = tirx.const(1, dtype)
    return prim.LT(tirx.bitwise_and(condition.astype(dtype), one), one)


def _is_float(expr: ir.Expr) -> bool:
    return "float" in str(expr.ty.dtype)


def with_hidden_zero(operator: str) -> Callable[[relax.BlockBuilder, relax.Call], relax.Expr]:
    """Return how relax's add, multiply, subtract or divide is written out: as ever, but where an operand is a zero."""
    kind = {"add": prim.Add, "multiply": prim.Mul, "subtract": prim.Sub, "divide": prim.Div}[operator]
    default = ir.Op.get(f"relax.{operator}").get_attr("FLegalize")

    def write_out(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        zeros = [_zero(argument) for argument in call.args]
        if all(zero is None for zero in zeros):
            return default(builder, call)

        def compute(*tensors: te.Tensor) -> te.Tensor:
            def element(*index: Any) -> ir.Expr:
                read = iter(tensors)
                return kind(*(next(read)(*index) if zero is None else zero for zero in zeros))

            return te.compute(tensors[0].shape, element, name=f"T_{operator}")

        tensors = [argument for argument, zero in zip(call.args, zeros) if zero is None]
        return builder.call_te(compute, *tensors, primfunc_name_hint=operator) if tensors else default(builder, call)

    return write_out


def _zero(argument: relax.Expr) -> ir.Expr | None:
    """The number of a constant scalar that is zero, so that no simplifier sees it; None for anything else."""
    if not isinstance(argument, ir.GenericConst) or argument.value.numpy().ndim or not _is_float(argument):
        return None
    value = float(argument.value.numpy())
    if value != 0:
        return None
    zero = tirx.reinterpret("float32", tirx.const(1 << 31, "uint32"))  # -0, as TVM takes bits of 0 for a pointer
    if not np.signbit(value):
        zero = prim.Mul(zero, tirx.const(-1.0, "float32"))
    return zero.astype(str(argument.ty.dtype))


WITH_ZEROS = {f"relax.{operator}": with_hidden_zero(operator) for operator in ("add", "multiply", "subtract", "divide")}
"""How these are written out, by their names."""
