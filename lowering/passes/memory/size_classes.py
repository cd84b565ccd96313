"""Rounds storage sizes up to powers of two.

The runtime's allocator caches freed memory by size, forever. A model that is called with every length from 1 to 512
would cache 512 sets of its tensors; so it caches ten. Allocated memory that is never touched costs nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import prim

from ...arithmetic import PAGE, round_to_size_class
from ...importing.values import MAX_TENSOR_BYTES
from ...tensorir.expressions import Expr


def size_classes(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with the size of every storage rounded up to a power of two, at least a page."""
    mod = mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod[variable] = _StorageRounder().visit_expr(function)
    return mod


@relax.expr_functor.mutator
class _StorageRounder(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Call:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") != "relax.memory.alloc_storage":
            return call
        (size,) = call.args[0].values
        return relax.Call(call.op, [relax.ShapeExpr([_round_up(size)]), *call.args[1:]], call.attrs, call.ty_args)


def _round_up(size: Expr) -> Expr:
    """Return the smallest power of two that is at least `size` and a page."""
    if isinstance(size, prim.IntImm):
        return tirx.const(round_to_size_class(int(size.value)), "int64")
    bits = 64 - tirx.clz(tirx.max(size, PAGE) - 1)
    rounded = tirx.shift_left(tirx.const(1, "int64"), bits)
    # Multiplied sizes may wrap and look small. In float64 they do not; no allocator has that much memory.
    wraps = to_float64(size) > tirx.const(float(MAX_TENSOR_BYTES), "float64")
    return prim.Select(wraps, tirx.const(MAX_TENSOR_BYTES, "int64"), rounded)


def to_float64(size: Expr) -> Expr:
    """Return the size computed in float64."""
    if isinstance(size, prim.Add | prim.Sub | prim.Mul):
        a, b = to_float64(size.a), to_float64(size.b)
        return a + b if isinstance(size, prim.Add) else a - b if isinstance(size, prim.Sub) else a * b
    if isinstance(size, prim.Min | prim.Max):
        return (tirx.min if isinstance(size, prim.Min) else tirx.max)(to_float64(size.a), to_float64(size.b))
    if isinstance(size, prim.FloorDiv):  # without rounding: an upper bound
        return to_float64(size.a) / tirx.max(to_float64(size.b), tirx.const(1.0, "float64"))
    return size.astype("float64")
