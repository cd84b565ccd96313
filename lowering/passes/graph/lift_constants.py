"""Functions that differ only in float constants become one function, which takes the constants as arguments.

    multiply(x): x * 0.25    multiply1(x): x * 0.75   ->   multiply(x, c): x * c, for both calls

A quantized model has a scale of its own in every layer: without this pass each layer would have its own kernels. Only
operands of _LIFTED become arguments. A kernel may need the value of any other constant: x / 8 is a multiplication,
and pow(x, 2) another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir import prim
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.reading.stages import Stage, read_stages, write_stages

from ...tensorir.expressions import Expr, children, rebuild, rewrite
from ..main_function import rewrite_functions

_CALL = ir.Op.get("relax.call_tir")
_LIFTED = (prim.Add, prim.Sub, prim.Mul, prim.Min, prim.Max, prim.Select, prim.LT, prim.LE, prim.GT, prim.GE)

Constant: TypeAlias = tuple[str, float]
"""An element type and a value."""


@dataclass(frozen=True)
class _Kernel:
    """A function of stages, its liftable constants in order, and itself with zeros in their stead."""

    variable: ir.GlobalVar
    func: tirx.PrimFunc
    stages: Sequence[Stage]
    constants: Sequence[Constant]
    skeleton: tirx.PrimFunc


@dataclass(frozen=True)
class _Lifted:
    """The function for the calls of another one, and the constants that these calls append to their arguments."""

    func: tirx.PrimFunc
    constants: Sequence[Constant]


def lift_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with the constants that calls of equal functions differ in as arguments of these calls."""
    calls: dict[ir.GlobalVar, int] = {}

    def count_arguments(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and expr.op == _CALL:
            calls[expr.args[0]] = len(expr.args[1].fields)

    for _, func in mod.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func.body, count_arguments)
    lifted: dict[ir.GlobalVar, _Lifted] = {}
    for kernels in _group_kernels(mod, calls):
        lifted |= _lift(kernels, calls[kernels[0].variable])
    return rewrite_functions(mod, _CallRewriter(mod, lifted)) if lifted else mod


def _group_kernels(mod: tvm.IRModule, calls: Mapping[ir.GlobalVar, int]) -> list[list[_Kernel]]:
    """Return the kernels that differ only in liftable constants, in groups of two or more."""
    groups: defaultdict[tuple[int, int], list[_Kernel]] = defaultdict(list)
    for variable, arguments in calls.items():
        kernel = _read_kernel(variable, mod[variable])
        if kernel is not None:
            groups[tvm_ffi.structural_hash(kernel.skeleton), arguments].append(kernel)
    return [
        group
        for group in groups.values()
        if group[1:] and all(tvm_ffi.structural_equal(group[0].skeleton, other.skeleton) for other in group[1:])
    ]


def _read_kernel(variable: ir.GlobalVar, func: tirx.PrimFunc) -> _Kernel | None:
    stages = read_stages(func)
    if stages is None:
        return None
    constants: list[Constant] = []

    def clear(constant: prim.FloatImm) -> Expr:
        constants.append((str(constant.ty.dtype), float(constant.value)))
        return tirx.const(0.0, str(constant.ty.dtype))

    cleared = _replace_constants(stages, clear)
    if not constants:
        return None
    return _Kernel(variable, func, stages, constants, write_stages(cleared, func.params))


def _lift(kernels: Sequence[_Kernel], arguments: int) -> dict[ir.GlobalVar, _Lifted]:
    """Return the function that takes what the kernels differ in after their arguments, for each of them."""
    columns = list(zip(*(kernel.constants for kernel in kernels)))
    keys = [repr(column) for column in columns]  # 0.0 and -0.0 are equal, but not the same constant
    lifted = {key: column for key, column in zip(keys, columns) if len(set(map(repr, column))) > 1}
    params = {
        key: tirx.decl_buffer((), column[0][0], f"constant_{n}") for n, (key, column) in enumerate(lifted.items())
    }
    first, order = kernels[0], iter(keys)

    def load(constant: prim.FloatImm) -> Expr:
        param = params.get(next(order))
        return constant if param is None else tirx.BufferLoad(param, [])

    stages = _replace_constants(first.stages, load)
    inputs, outputs = first.func.params[:arguments], first.func.params[arguments:]
    func = write_stages(stages, [*inputs, *params.values(), *outputs])
    return {
        kernel.variable: _Lifted(func, [column[n] for column in lifted.values()]) for n, kernel in enumerate(kernels)
    }


def _replace_constants(stages: Sequence[Stage], change: Callable[[prim.FloatImm], Expr]) -> list[Stage]:
    """Return the stages with each liftable constant replaced, always in the same order."""

    def replace_operands(node: Expr) -> Expr | None:
        operands = children(node) if isinstance(node, _LIFTED) else []
        if not any(isinstance(operand, prim.FloatImm) for operand in operands):
            return None
        changed = [
            change(operand) if isinstance(operand, prim.FloatImm) else rewrite(operand, replace_operands)
            for operand in operands
        ]
        return rebuild(node, changed)

    return [replace(stage, value=rewrite(stage.value, replace_operands)) for stage in stages]


@mutator
class _CallRewriter(PyExprMutator):
    """Makes calls of the lifted functions, and gives them their constants."""

    def __init__(self, mod: tvm.IRModule, lifted: Mapping[ir.GlobalVar, _Lifted]) -> None:
        others = {variable: func for variable, func in mod.functions_items() if variable not in lifted}
        super().__init__(tvm.IRModule(others, attrs=mod.attrs))  # its functions may have the names of the old ones
        self._lifted = lifted

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        lifted = self._lifted.get(call.args[0]) if call.op == _CALL else None
        if lifted is None:
            return super().visit_call_(call)
        function = self.builder_.add_func(lifted.func, call.args[0].name_hint)
        arguments = [self.visit_expr(argument) for argument in call.args[1].fields]
        constants = [relax.const(value, dtype) for dtype, value in lifted.constants]
        operands = [function, relax.Tuple([*arguments, *constants]), *call.args[2:]]
        return relax.Call(call.op, operands, None, call.ty_args)
