"""Checks of tensors and sizes by our functions, which take the same arguments as the builtins of the runtime.

VMShapeLower makes every match_cast a call of a builtin, whose error has the compiler's own names. Our function reports
the importer's text. It checks the type of parameters by another, and ours checks strides and byte offsets, too: kernels
rely on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tvm import ir, relax

from ...importing.checks import MATCH_SHAPE, TENSOR
from ...importing.origins import iterate_bindings
from ..compile_state import CompileState

_BUILTIN, _BUILTIN_OF_TYPES = "vm.builtin.match_shape", "vm.builtin.check_tensor_info"
# The start of the builtin's last argument for assertions; those of parameters and results cannot fail.
_ASSERTION = "ErrorContext(match_cast"
_UNKNOWN = "sizes do not fit together inside it: a tensor is of another shape"


def name_shape_assertions(state: CompileState) -> CompileState:
    """Let shape assertions raise the state's error texts."""
    mod = state.module.clone()
    for variable, function in mod.functions_items():
        if isinstance(function, relax.Function):
            mod[variable] = _AssertionNamer(function, state.assertions).visit_expr(function)
    return replace(state, module=mod)


@relax.expr_functor.mutator
class _AssertionNamer(relax.PyExprMutator):
    def __init__(self, function: relax.Function, asserted: Mapping[str, str]) -> None:
        super().__init__()
        self.names: dict[relax.Expr, str] = {}
        for binding in iterate_bindings(function.body):
            if isinstance(binding, relax.MatchCast) and binding.var.name in asserted:
                self.names.setdefault(binding.value, asserted[binding.var.name])

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        symbol = call.op.global_symbol if isinstance(call.op, relax.ExternFunc) else ""
        if symbol == _BUILTIN_OF_TYPES:
            return relax.Call(relax.ExternFunc(TENSOR), call.args, call.attrs, call.ty_args)
        if symbol != _BUILTIN:
            return super().visit_call_(call)
        context = str(call.args[-1].value)
        if not context.startswith(_ASSERTION):
            return call
        name = ir.StringImm(self.names.get(call.args[0], _UNKNOWN))
        return relax.Call(relax.ExternFunc(MATCH_SHAPE), [*call.args[:-1], name], call.attrs, call.ty_args)
