"""Constant folding with a budget: TVM's FoldConstant evaluates every kernel of constants, whatever its result.

A recipe for a large tensor (ConstantOfShape, Expand, Range) stays a kernel, which takes no memory before the run.
"""

from __future__ import annotations

import math

import tvm
from tvm import DataType, ir, relax, tirx

# Maximum bytes of a folded constant.
_MAX_BYTES = 2**20

_CALL = "relax.call_tir"
# An operator that FoldConstant ignores.
_IGNORED_CALL = "relax.call_dps_packed"


def fold_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with computations of constants replaced by their results, if these are small."""
    mod = _swap_calls(mod, _CALL, _IGNORED_CALL)
    return _swap_calls(relax.transform.FoldConstant()(mod), _IGNORED_CALL, _CALL)


def _swap_calls(mod: tvm.IRModule, old: str, new: str) -> tvm.IRModule:
    mod = mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod[variable] = _CallSwapper(old, new).visit_expr(function)
    return mod


@relax.expr_functor.mutator
class _CallSwapper(relax.PyExprMutator):
    """Replaces the operator in calls of kernels whose results must not be folded."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__()
        self.old, self.new = ir.Op.get(old), ir.Op.get(new)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op != self.old or not isinstance(call.args[0], ir.GlobalVar) or not _must_stay(call):
            return super().visit_call_(call)
        return relax.Call(self.new, call.args, call.attrs, call.ty_args)


def _must_stay(call: relax.Call) -> bool:
    """Return whether a result is large, or empty: TVM cannot load a module with an empty constant."""
    kind = call.ty_args[0]
    kinds = list(kind.fields) if isinstance(kind, tvm.ir.TupleType) else [kind]
    sizes = []
    for result in kinds:
        dims = result.shape.values
        if all(isinstance(d, tirx.IntImm) for d in dims):
            sizes.append(math.prod(int(d) for d in dims) * max(1, DataType(str(result.dtype)).bits // 8))
    return 0 in sizes or sum(sizes) > _MAX_BYTES
