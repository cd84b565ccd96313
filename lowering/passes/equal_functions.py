"""Functions that compute the same become one function, which is scheduled and compiled once.

    transpose6(x, height, width)  transpose8(x, width, height)   ->   transpose4(x, height, width), for both calls

TVM passes symbols that are not the size of a tensor in the order of a hash table of addresses. Functions that differ
in nothing else are not equal, and how many there are changes from run to run. Here the order is that in which a
function mentions its symbols, and names are numbered anew: what comes out depends on the model alone.
"""

from __future__ import annotations

import re

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.reading.stages import read_stages

_CALLS = [ir.Op.get("relax.call_tir"), ir.Op.get("relax.call_tir_inplace")]
_NUMBER = re.compile(r"(?<=[a-z])\d+$")
_MEANT = re.compile(r"exp2|expm1|log2|log10|log1p|atan2|b?float(16|32|64)|u?int(4|8|16|32|64)")
"""Parts of names whose numbers belong to them."""


def merge_equal_functions(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module, which FuseTIR wrote, in which all call one of the functions that are equal."""
    merger = _Merger(mod)
    bodies = {
        variable: merger.visit_expr(function.body)
        for variable, function in mod.functions_items()
        if isinstance(function, relax.Function)
    }
    merged = merger.builder_.get()
    for variable, body in bodies.items():
        old = mod[variable]
        merged[variable] = relax.Function(old.params, body, old.ret_ty, old.is_pure, old.attrs)
    return relax.transform.DeadCodeElimination()(merged)


@mutator
class _Merger(PyExprMutator):
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(tvm.IRModule({}, attrs=mod.attrs))
        self._mod = mod
        self._orders: dict[ir.GlobalVar, list[int]] = {}  # which of its parameters comes at which place
        self._merged: dict[ir.GlobalVar, ir.GlobalVar] = {}
        for variable, function in mod.functions_items():
            if not isinstance(function, tirx.PrimFunc):
                self.builder_.update_func(variable, function)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op not in _CALLS:
            return super().visit_call_(call)
        callee, given = call.args[0], call.args[1].fields
        if callee not in self._merged:
            self._add(callee)
        arguments = relax.Tuple([self.visit_expr(given[n]) for n in self._orders[callee] if n < len(given)])
        return relax.Call(call.op, [self._merged[callee], arguments, *call.args[2:]], call.attrs, call.ty_args)

    def _add(self, callee: ir.GlobalVar) -> None:
        """Add the function in its own order of parameters; the builder gives an equal one where it has it."""
        function = self._mod[callee]
        order = _order(function)
        params = [function.params[n] for n in order]
        ordered = tirx.PrimFunc(params, function.body, function.ret_type, attrs=function.attrs)
        self._orders[callee] = order
        self._merged[callee] = self.builder_.add_func(ordered, _unnumbered(callee.name_hint))


def _unnumbered(name: str) -> str:
    """Return the name of a function without the numbers that TVM gave it and those that it was fused from."""
    parts = (_MEANT.match(part) or part for part in name.split("_"))
    return "_".join(_NUMBER.sub("", part) if isinstance(part, str) else part[0] for part in parts)


def _order(function: tirx.PrimFunc) -> list[int]:
    """Return the parameters by place: symbols as the function mentions them, at the places that symbols had.

    Other kernels than stages read their parameters by place, and keep them.
    """
    places = [n for n, param in enumerate(function.params) if not tirx.is_buffer_var(param)]
    order = list(range(len(function.params)))
    if len(places) < 2 or read_stages(function) is None:
        return order
    mentioned: list[tirx.Var] = []
    for buffer in filter(tirx.is_buffer_var, function.params):
        for extent in buffer.shape:
            tvm_ffi.structural_walk(extent, (tirx.Var, mentioned.append))
    tvm_ffi.structural_walk(function.body, (tirx.Var, mentioned.append))
    first = {var: n for n, var in reversed(list(enumerate(mentioned)))}
    for place, n in zip(places, sorted(places, key=lambda n: first.get(function.params[n], len(mentioned)))):
        order[place] = n
    return order
