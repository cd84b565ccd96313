"""Removes checks of indices that are provably in bounds.

Elements of an index tensor are expressed over its own indices (elements.py): positions made by Range, remainders,
clipped values. If the bounds of such an expression are inside, the check is removed, and its reader fuses with the
computation of the indices. On a GPU, whose memory the host cannot read, all checks of indices are removed: kernels
clamp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, tirx

from ...importing.checks import INDICES, read_callee_name
from ...importing.origins import iterate_bindings
from ..compile_state import CompileState
from .elements import ElementExpressions, NoExpressionError


def prove_indices(state: CompileState) -> CompileState:
    """Remove the checks of indices that cannot fail; on a GPU all of them."""
    mod = state.module
    main = mod["main"]
    values = {binding.var: binding.value for binding in iterate_bindings(main.body)}
    if not any(read_callee_name(value) == INDICES for value in values.values()):
        return state
    mod = mod.clone()
    mod["main"] = _CheckRemover(mod, values, bool(state.target.architecture)).visit_expr(main)
    return replace(state, module=relax.transform.CanonicalizeBindings()(mod))


@relax.expr_functor.mutator
class _CheckRemover(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, values: dict[relax.Var, relax.Expr], on_gpu: bool) -> None:
        super().__init__()
        self.mod, self.values, self.on_gpu = mod, values, on_gpu

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if read_callee_name(call) == INDICES and (self.on_gpu or _is_provable(self.mod, self.values, call)):
            return self.visit_expr(call.args[1])
        return super().visit_call_(call)


def _is_provable(mod: tvm.IRModule, values: dict[relax.Var, relax.Expr], call: relax.Call) -> bool:
    _, tensor, bounds, from_the_back, *_ = call.args
    shape = tensor.ty.shape.values
    axis_vars: list[Any] = [tirx.Var(f"i{axis}", "int64") for axis in range(len(shape))]
    elements = ElementExpressions(mod, values, dict(zip(axis_vars, shape)), lambda *_: False)
    for k, bound in enumerate(bounds.values):
        indices = axis_vars if len(bounds.values) == 1 else [*axis_vars[:-1], tirx.const(k, "int64")]
        try:
            index = elements.read_element(tensor, indices).astype("int64")
        except NoExpressionError:
            return False
        elements.facts.add_size(bound)
        least = -bound if int(from_the_back) else tirx.const(0, "int64")
        prove = elements.facts.can_prove
        low, high = elements.find_bounds(index) or (index, index)
        if not (prove(index >= least) or prove(low >= least)) or not (prove(index < bound) or prove(high < bound)):
            return False
    return True
