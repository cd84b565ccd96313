"""Moved elements: stored as they were loaded, possibly selected among several.

A move preserves every bit, including those of NaNs. Kernels compute half precision in float32, and a move in that type
would be two conversions, which change NaNs. Kernels move the bits as unsigned integers instead:

    before: y[i] = if_then_else(c, x[i], x[i] + 1)                                            of float16
    after:  y[i] = reinterpret(if_then_else(c, reinterpret(x[i]), reinterpret(x[i] + 1)))     of uint16
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from tvm import ir, tirx
from tvm.ir import prim

from .expressions import Expr

HALF = ("float16", "bfloat16")
"""Types whose elements are computed in another type."""

BITS = "uint16"
"""The integer type of their bits."""

_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")
_REINTERPRET = ir.Op.get("tirx.reinterpret")


def read_choice(expr: Expr) -> tuple[Expr, Expr, Expr] | None:
    """Return the condition and both values of a selection, or None."""
    if isinstance(expr, prim.Select):
        return expr.condition, expr.true_value, expr.false_value
    if isinstance(expr, ir.Call) and expr.op.same_as(_IF_THEN_ELSE):
        condition, yes, no = expr.args
        return condition, yes, no
    return None


def find_moved_loads(expr: Expr) -> Iterator[ir.TensorLoad]:
    """Yield the loads among the values from which `expr` selects."""
    todo = [expr]
    while todo:
        node = todo.pop()
        choice = read_choice(node)
        if choice is not None:
            todo += choice[1:]
        elif isinstance(node, ir.TensorLoad):
            yield node


def is_reinterpreted(value: Expr) -> bool:
    """Return whether a half-precision value is reinterpreted from its bits."""
    return isinstance(value, ir.Call) and value.op.same_as(_REINTERPRET) and value.args[0].ty == BITS


def to_bits(value: Expr) -> Expr:
    """Return the bits of a half-precision value."""
    return value.args[0] if is_reinterpreted(value) else tirx.reinterpret(BITS, value)


def constant_to_bits(value: prim.FloatImm) -> Expr:
    """Return the bits of a half-precision constant."""
    number = np.array(value.value).astype(getattr(ml_dtypes, str(value.ty), str(value.ty)))
    return tirx.const(int(number.view(BITS)), BITS)


def read_moved_value(bits: Expr) -> Expr | None:
    """Return the half-precision value whose bits an expression is; None for any other expression."""
    if not isinstance(bits, ir.Call) or not bits.op.same_as(_REINTERPRET) or bits.ty != BITS:
        return None
    return bits.args[0] if str(bits.args[0].ty) in HALF else None
