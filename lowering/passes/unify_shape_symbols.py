"""Fused functions take the symbols that none of their tensors has as one shape.

TVM's FuseOps passes some of them as numbers and others in a shape. FuseTIR defines those numbers twice where there are
both, and fails.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import PrimType


def unify_shape_symbols(mod: tvm.IRModule) -> tvm.IRModule:
    """The module, whose fused functions with numbers and a shape among their parameters have a larger shape instead."""
    mixed = {}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function) and function.attrs and "Primitive" in function.attrs:
            numbers = [k for k, p in enumerate(function.params) if isinstance(p.ty, PrimType)]
            if numbers and isinstance(function.params[-1].ty, relax.ShapeType):
                mixed[variable] = numbers
    if not mixed:
        return mod
    calls = _Calls(mod, mixed)
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function) and variable not in mixed:
            calls.builder_.update_func(variable, calls.visit_expr(function))
    made = calls.builder_.get()
    for variable in mixed:
        del made[variable]
    return made


def _with_one_shape(function: relax.Function, numbers: list[int]) -> relax.Function:
    *others, shape = function.params
    kind = relax.ShapeType([*(others[k] for k in numbers), *shape.ty.values])
    params = [*(p for k, p in enumerate(others) if k not in numbers), relax.Var(shape.name, kind)]
    return relax.Function(params, function.body, function.ret_ty, function.is_pure, function.attrs)


@relax.expr_functor.mutator
class _Calls(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, mixed: dict[Any, list[int]]) -> None:
        super().__init__(mod)
        self.mixed = mixed
        self.made = {v: self.builder_.add_func(_with_one_shape(mod[v], k), v.name_hint) for v, k in mixed.items()}

    def visit_call_(self, call: Any) -> Any:
        numbers = self.mixed.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if numbers is None:
            return super().visit_call_(call)
        *others, shape = call.args
        tensors = [a for k, a in enumerate(others) if k not in numbers]
        values = [*(others[k] for k in numbers), *shape.values]
        return relax.Call(self.made[call.op], [*tensors, relax.ShapeExpr(values)], call.attrs, call.ty_args)
