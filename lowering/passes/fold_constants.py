"""Constant folding with a budget: TVM's FoldConstant runs every kernel of constants, whatever it makes.

A recipe for a large tensor (ConstantOfShape, Expand, Range) stays a kernel, which takes no memory before the run.
"""

from __future__ import annotations

import math

import tvm
from tvm import DataType, ir, relax, tirx

# Bytes of a constant that folding may make.
_MOST_BYTES = 2**20

_CALL = "relax.call_tir"
# What FoldConstant does not look at.
_HELD = "relax.call_dps_packed"


def fold_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with small results of constants in place of what computes them."""
    mod = _swapped(mod, _CALL, _HELD)
    return _swapped(relax.transform.FoldConstant()(mod), _HELD, _CALL)


def _swapped(mod: tvm.IRModule, old: str, new: str) -> tvm.IRModule:
    mod = mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod[variable] = _Swapped(old, new).visit_expr(function)
    return mod


@relax.expr_functor.mutator
class _Swapped(relax.PyExprMutator):
    """Calls of kernels whose results are not to be folded by another operator."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self.old, self.new = ir.Op.get(old), ir.Op.get(new)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op != self.old or not isinstance(call.args[0], ir.GlobalVar) or not _stays(call):
            return super().visit_call_(call)
        return relax.Call(self.new, call.args, call.attrs, call.ty_args)


def _stays(call: relax.Call) -> bool:
    """Whether a result is large, or empty: TVM cannot load a module that holds an empty constant."""
    kind = call.ty_args[0]
    kinds = list(kind.fields) if isinstance(kind, tvm.ir.TupleType) else [kind]
    sizes = []
    for each in kinds:
        dims = each.shape.values
        if all(isinstance(d, tirx.IntImm) for d in dims):
            sizes.append(math.prod(int(d) for d in dims) * max(1, DataType(str(each.dtype)).bits // 8))
    return 0 in sizes or sum(sizes) > _MOST_BYTES
