"""Functions that compute the same are merged into one, which is scheduled and compiled once.

    transpose6(x, height, width)  transpose8(x, width, height)   ->   transpose4(x, height, width), for both calls

TVM passes symbols that are not the size of a tensor in the order of a hash table of addresses. Functions that differ
only in that order are not equal, and their number changes from run to run. Here the order is that of the first use in
the function, and names are numbered anew: the result depends on the model only.
"""

from __future__ import annotations

import re

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.reading.stages import read_stages

from ..main_function import rewrite_functions

_CALLS = [ir.Op.get("relax.call_tir"), ir.Op.get("relax.call_tir_inplace")]
_NUMBER = re.compile(r"(?<=[a-z])\d+$")
_MEANINGFUL = re.compile(r"exp2|expm1|log2|log10|log1p|atan2|b?float(16|32|64)|u?int(4|8|16|32|64)")
"""Components of names whose numbers have a meaning."""


def merge_equal_functions(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module, written by FuseTIR, in which all calls of equal functions call one of them."""
    return rewrite_functions(mod, _FunctionMerger(mod))


@mutator
class _FunctionMerger(PyExprMutator):
    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(tvm.IRModule({}, attrs=mod.attrs))
        self._mod = mod
        self._orders: dict[ir.GlobalVar, list[int]] = {}  # the index of the parameter at each position
        self._merged: dict[ir.GlobalVar, ir.GlobalVar] = {}
        for variable, function in mod.functions_items():
            if not isinstance(function, tirx.PrimFunc):
                self.builder_.update_func(variable, function)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if call.op not in _CALLS:
            return super().visit_call_(call)
        callee, arguments = call.args[0], call.args[1].fields
        if callee not in self._merged:
            self._add(callee)
        ordered = relax.Tuple([self.visit_expr(arguments[n]) for n in self._orders[callee] if n < len(arguments)])
        return relax.Call(call.op, [self._merged[callee], ordered, *call.args[2:]], call.attrs, call.ty_args)

    def _add(self, callee: ir.GlobalVar) -> None:
        """Add the function in its canonical order of parameters; the builder returns an equal one if it has it."""
        function = self._mod[callee]
        order = _order_parameters(function)
        params = [function.params[n] for n in order]
        ordered = tirx.PrimFunc(params, function.body, function.ret_type, attrs=function.attrs)
        self._orders[callee] = order
        self._merged[callee] = self.builder_.add_func(ordered, _strip_numbers(callee.name_hint))


def _strip_numbers(name: str) -> str:
    """Return the name of a function without the numbers added by TVM, those of fused functions included."""
    components = (_MEANINGFUL.match(component) or component for component in name.split("_"))
    return "_".join(
        _NUMBER.sub("", component) if isinstance(component, str) else component[0] for component in components
    )


def _order_parameters(function: tirx.PrimFunc) -> list[int]:
    """Return the parameter at each position: symbols in order of first use, at the positions that symbols had.

    Kernels other than stages read their parameters by position, and keep them.
    """
    positions = [n for n, param in enumerate(function.params) if not tirx.is_buffer_var(param)]
    order = list(range(len(function.params)))
    if len(positions) < 2 or read_stages(function) is None:
        return order
    mentioned: list[tirx.Var] = []
    for buffer in filter(tirx.is_buffer_var, function.params):
        for extent in buffer.shape:
            tvm_ffi.structural_walk(extent, (tirx.Var, mentioned.append))
    tvm_ffi.structural_walk(function.body, (tirx.Var, mentioned.append))
    first = {var: n for n, var in reversed(list(enumerate(mentioned)))}
    for position, n in zip(positions, sorted(positions, key=lambda n: first.get(function.params[n], len(mentioned)))):
        order[position] = n
    return order
