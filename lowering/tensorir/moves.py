"""Elements that are moved: stored as they were loaded, whatever is selected among them.

A move keeps every bit, those of NaNs included. Kernels and TVM's own passes compute with half precision in float32, so
that a move in that type would be two conversions, which change NaNs. It is one of unsigned integers instead:

    y[i] = if_then_else(c, x[i], x[i] + 1)                                                      float16
    y[i] = reinterpret(if_then_else(c, reinterpret(x[i]), reinterpret(x[i] + 1)))               of uint16
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import ir, tirx
from tvm.ir import prim

from .expressions import Expr

HALF = ("float16", "bfloat16")
"""Types whose elements are computed with in another type."""

BITS = "uint16"
"""The type of their bits."""

_IF_THEN_ELSE = ir.Op.get("prim.if_then_else")
_REINTERPRET = ir.Op.get("tirx.reinterpret")


def read_choice(expr: Expr) -> tuple[Expr, Expr, Expr] | None:
    """Return the condition and both values of a selection, or None."""
    if isinstance(expr, prim.Select):
        return expr.condition, expr.true_value, expr.false_value
    if isinstance(expr, ir.Call) and expr.op.same_as(_IF_THEN_ELSE):
        return tuple(expr.args)
    return None


def moved_loads(expr: Expr) -> Iterator[ir.TensorLoad]:
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
    """Return whether a half-precision value is given by its bits."""
    return isinstance(value, ir.Call) and value.op.same_as(_REINTERPRET) and value.args[0].ty == BITS


def bits_of(value: Expr) -> Expr:
    """Return the bits of a half-precision value."""
    if isinstance(value, prim.FloatImm):
        return constant_bits(value)
    return value.args[0] if is_reinterpreted(value) else tirx.reinterpret(BITS, value)


def constant_bits(value: prim.FloatImm) -> Expr:
    """Return the bits of a half-precision constant."""
    number = np.array(value.value).astype(getattr(ml_dtypes, str(value.ty), str(value.ty)))
    return tirx.const(int(number.view(BITS)), BITS)


def moved_value(bits: Expr) -> Expr | None:
    """Return the half-precision value whose bits an expression gives; None for any other expression."""
    if not isinstance(bits, ir.Call) or not bits.op.same_as(_REINTERPRET) or bits.ty != BITS:
        return None
    return bits.args[0] if str(bits.args[0].ty) in HALF else None


def move_bits(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Rewrite the stores that move half precision, so that TVM's own passes leave the elements as they are."""

    def moved(store: tirx.BufferStore) -> tirx.BufferStore:
        if str(store.value.ty) not in HALF or not any(moved_loads(store.value)):
            return store
        value = tirx.reinterpret(str(store.value.ty), _selected_bits(store.value))
        return tirx.BufferStore(store.buffer, value, store.indices)

    return tvm_ffi.structural_map(func, (tirx.BufferStore, moved))


def _selected_bits(expr: Expr) -> Expr:
    """Return the bits of a half-precision value, selected as integers."""
    choice = read_choice(expr)
    if choice is None:
        return bits_of(expr)
    condition, yes, no = choice[0], _selected_bits(choice[1]), _selected_bits(choice[2])
    if isinstance(expr, prim.Select):
        return prim.Select(condition, yes, no)
    return tirx.if_then_else(condition, yes, no)
