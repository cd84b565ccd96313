"""Storage is asked for in powers of two.

The runtime's allocator keeps what is given back, by size, and for ever. A model that is called with every length from 1
to 512 would keep 512 sets of its tensors; so it keeps ten. Memory that is asked for and never touched costs nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.ir import prim

from ..arithmetic import PAGE, size_class
from ..importing.values import MOST_BYTES
from ..tensorir.expressions import Expr


def size_classes(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with the size of every storage rounded up to a power of two, at least a page."""
    mod = mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod[variable] = _Rounded().visit_expr(function)
    return mod


@relax.expr_functor.mutator
class _Rounded(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Call:
        call = super().visit_call_(call)
        if getattr(call.op, "name", "") != "relax.memory.alloc_storage":
            return call
        (size,) = call.args[0].values
        return relax.Call(call.op, [relax.ShapeExpr([_power_of_two(size)]), *call.args[1:]], call.attrs, call.ty_args)


def _power_of_two(size: Expr) -> Expr:
    """The smallest that is at least `size` and a page."""
    if isinstance(size, prim.IntImm):
        return tirx.const(size_class(int(size.value)), "int64")
    bits = 64 - tirx.clz(tirx.max(size, PAGE) - 1)
    rounded = tirx.shift_left(tirx.const(1, "int64"), bits)
    # Products of sizes may wrap, and look small. In float64 they do not; no allocator has that much.
    wraps = _real(size) > tirx.const(float(MOST_BYTES), "float64")
    return prim.Select(wraps, tirx.const(MOST_BYTES, "int64"), rounded)


def _real(size: Expr) -> Expr:
    """The size computed in float64."""
    if isinstance(size, prim.Add | prim.Sub | prim.Mul):
        a, b = _real(size.a), _real(size.b)
        return a + b if isinstance(size, prim.Add) else a - b if isinstance(size, prim.Sub) else a * b
    if isinstance(size, prim.Min | prim.Max):
        return (tirx.min if isinstance(size, prim.Min) else tirx.max)(_real(size.a), _real(size.b))
    if isinstance(size, prim.FloorDiv):  # nothing is rounded: an upper bound
        return _real(size.a) / tirx.max(_real(size.b), tirx.const(1.0, "float64"))
    return size.astype("float64")
