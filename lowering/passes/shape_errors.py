"""Assertions of shapes say which node they are of.

VMShapeLower makes every match_cast a call of a builtin of the runtime, whose error speaks of the compiler's own names.
A function of ours that takes the same arguments says what the importer noted.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import ir, relax

from ..importing.checks import MATCH_SHAPE
from ..importing.origins import bindings

_BUILTIN = "vm.builtin.match_shape"
# What the builtin's last argument says of assertions; those of parameters and results cannot fail.
_ASSERTION = "ErrorContext(match_cast"
_UNKNOWN = "sizes do not fit together inside it: a tensor is of another shape"


def shape_errors(mod: tvm.IRModule, asserted: Mapping[str, str]) -> tvm.IRModule:
    """The module with named assertions. asserted: what must have which shape, by the names of the variables that do."""
    mod = mod.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod[variable] = _Named(function, asserted).visit_expr(function)
    return mod


@relax.expr_functor.mutator
class _Named(relax.PyExprMutator):
    def __init__(self, function: relax.Function, asserted: Mapping[str, str]) -> None:
        super().__init__()
        self.names: dict[relax.Expr, str] = {}
        for binding in bindings(function.body):
            if isinstance(binding, relax.MatchCast) and binding.var.name in asserted:
                self.names.setdefault(binding.value, asserted[binding.var.name])

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if not isinstance(call.op, relax.ExternFunc) or call.op.global_symbol != _BUILTIN:
            return super().visit_call_(call)
        context = str(call.args[-1].value)
        if not context.startswith(_ASSERTION):
            return call
        name = ir.StringImm(self.names.get(call.args[0], _UNKNOWN))
        return relax.Call(relax.ExternFunc(MATCH_SHAPE), [*call.args[:-1], name], call.attrs, call.ty_args)
