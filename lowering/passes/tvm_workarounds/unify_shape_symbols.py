"""Fused functions take symbols that are not sizes of their tensors as one shape.

TVM's FuseOps passes some of them as numbers and others in a shape. If there are both, FuseTIR defines those numbers
twice, and fails.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import PrimType


def unify_shape_symbols(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module whose fused functions take one shape instead of numbers and a shape."""
    mixed = {}
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function) and function.attrs and "Primitive" in function.attrs:
            numbers = [k for k, p in enumerate(function.params) if isinstance(p.ty, PrimType)]
            if numbers and isinstance(function.params[-1].ty, relax.ShapeType):
                mixed[variable] = numbers
    if not mixed:
        return mod
    calls = _ShapeUnifier(mod, mixed)
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function) and variable not in mixed:
            calls.builder_.update_func(variable, calls.visit_expr(function))
    unified = calls.builder_.get()
    for variable in mixed:
        del unified[variable]
    return unified


def _merge_sizes(function: relax.Function, numbers: list[int]) -> relax.Function:
    *parameters, shape = function.params
    kind = relax.ShapeType([*(parameters[k] for k in numbers), *shape.ty.values])
    params = [*(p for k, p in enumerate(parameters) if k not in numbers), relax.Var(shape.name, kind)]
    return relax.Function(params, function.body, function.ret_ty, function.is_pure, function.attrs)


@relax.expr_functor.mutator
class _ShapeUnifier(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, mixed: dict[Any, list[int]]) -> None:
        super().__init__(mod)
        self.mixed = mixed
        self.unified = {v: self.builder_.add_func(_merge_sizes(mod[v], k), v.name_hint) for v, k in mixed.items()}

    def visit_call_(self, call: Any) -> Any:
        numbers = self.mixed.get(call.op) if isinstance(call.op, tvm.ir.GlobalVar) else None
        if numbers is None:
            return super().visit_call_(call)
        *arguments, shape = call.args
        tensors = [a for k, a in enumerate(arguments) if k not in numbers]
        values = [*(arguments[k] for k in numbers), *shape.values]
        return relax.Call(self.unified[call.op], [*tensors, relax.ShapeExpr(values)], call.attrs, call.ty_args)
