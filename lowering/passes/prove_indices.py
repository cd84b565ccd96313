"""Leaves out the checks of indices that can be proved to be inside.

An index tensor is written out, element by element, as an expression over its own indices (elements.py): positions made
by Range, remainders, what is clipped. Where the bounds of such an expression lie inside, there is no check, and its
reader fuses with what computes the indices. On a GPU, whose memory the host cannot read, all checks of indices are
left out: kernels clamp.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax, tirx

from ..importing.checks import INDICES, called
from ..importing.origins import bindings
from .elements import Elements, NoExpression


def prove_indices(mod: tvm.IRModule, on_gpu: bool) -> tvm.IRModule:
    """The module without the checks that cannot fail; on a GPU without any."""
    main = mod["main"]
    values = {binding.var: binding.value for binding in bindings(main.body)}
    if not any(called(value) == INDICES for value in values.values()):
        return mod
    mod = mod.clone()
    mod["main"] = _Proven(mod, values, on_gpu).visit_expr(main)
    return relax.transform.CanonicalizeBindings()(mod)


@relax.expr_functor.mutator
class _Proven(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, values: dict[relax.Var, relax.Expr], on_gpu: bool) -> None:
        super().__init__()
        self.mod, self.values, self.on_gpu = mod, values, on_gpu

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if called(call) == INDICES and (self.on_gpu or _is_proved(self.mod, self.values, call)):
            return self.visit_expr(call.args[1])
        return super().visit_call_(call)


def _is_proved(mod: tvm.IRModule, values: dict[relax.Var, relax.Expr], call: relax.Call) -> bool:
    _, tensor, bounds, from_the_back, *_ = call.args
    shape = tensor.ty.shape.values
    point: list[Any] = [tirx.Var(f"i{axis}", "int64") for axis in range(len(shape))]
    elements = Elements(mod, values, dict(zip(point, shape)), lambda *_: False)
    for k, bound in enumerate(bounds.values):
        at = point if len(bounds.values) == 1 else [*point[:-1], tirx.const(k, "int64")]
        try:
            index = elements.at(tensor, at).astype("int64")
        except NoExpression:
            return False
        elements.facts.add_size(bound)
        least = -bound if int(from_the_back) else tirx.const(0, "int64")
        prove = elements.facts.can_prove
        low, high = elements.ends(index) or (index, index)
        if not (prove(index >= least) or prove(low >= least)) or not (prove(index < bound) or prove(high < bound)):
            return False
    return True
