"""Matmuls read transposed operands without a copy.

A matmul x y of two activations with x or y transposed becomes a function that loads them transposed: kernels read or
pack operands in any order, and a separate transposition would read and write all of them.
"""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..compile_state import CompileState
from ..main_function import rewrite_main
from .convolutions import OUT_ELEMENTWISE_FUSABLE

_ACCUMULATOR_OPERANDS = {"float64": {"float64"}, "float32": {"float32", "float16", "bfloat16"}}


def fold_transposes(state: CompileState) -> CompileState:
    """Let floating-point matmuls in `main` read transposed operands.

    For GPUs only matmuls of types that tensor cores multiply are rewritten, as TVM schedules the others. Half precision
    accumulates in float32.
    """
    is_cpu = state.target.tvm.kind.name == "llvm"
    dtypes = set().union(*_ACCUMULATOR_OPERANDS.values()) if is_cpu else set(state.tensor_core_dtypes)
    return replace(state, module=rewrite_main(state.module, _TransposeFolder(state.module, dtypes)))


@mutator
class _TransposeFolder(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, dtypes: set[str]) -> None:
        super().__init__(mod)
        self.dtypes = dtypes

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.matmul") or any(x.ty.ndim < 2 for x in call.args):
            return call
        operands = [self.read_transposed(x) for x in call.args]
        dtypes = {str(x.ty.dtype) for x in (*call.args, call)}
        acc = next((acc for acc, operand_types in _ACCUMULATOR_OPERANDS.items() if dtypes <= operand_types), None)
        if all(axes is None for _, axes in operands) or acc is None or not dtypes <= self.dtypes:
            return call
        (a, a_axes), (b, b_axes) = operands
        return self.builder_.call_te(
            lambda a, b: make_transposed_matmul(a, b, a_axes, b_axes, acc, str(call.ty.dtype)),
            a,
            b,
            primfunc_name_hint="matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def read_transposed(self, x: relax.Expr) -> tuple[relax.Expr, list[int] | None]:
        """Return the source of a transposition x, with its axes; x itself, and None, for other expressions."""
        bound = self.lookup_binding(x) if isinstance(x, relax.Var) else x
        if not isinstance(bound, relax.Call) or bound.op != tvm.ir.Op.get("relax.permute_dims"):
            return x, None
        axes = bound.attrs.axes
        rank = bound.args[0].ty.ndim
        return bound.args[0], list(range(rank))[::-1] if axes is None else [int(axis) % rank for axis in axes]


def make_transposed_matmul(
    a: te.Tensor, b: te.Tensor, a_axes: list[int] | None, b_axes: list[int] | None, acc: str, dtype: str
) -> te.Tensor:
    """Return numpy.matmul of the tensors with their axes in these orders, accumulated in acc."""
    a_shape, b_shape = (
        [x.shape[axis] for axis in axes or range(len(x.shape))] for x, axes in ((a, a_axes), (b, b_axes))
    )
    rank = max(len(a_shape), len(b_shape))
    batch = [
        next((s[-n] for s in (a_shape, b_shape) if len(s) >= n and not _is_one(s[-n])), tvm.tirx.const(1, "int64"))
        for n in range(rank, 2, -1)
    ]
    k = te.reduce_axis((0, a_shape[-1]), name="k")

    def element(
        x: te.Tensor, shape: list, axes: list[int] | None, outer: tuple, row: tvm.ir.Expr, column: tvm.ir.Expr
    ) -> tvm.ir.Expr:
        batch_index = outer[len(outer) - (len(shape) - 2) :]
        index = [tvm.tirx.const(0, "int64") if _is_one(n) else i for n, i in zip(shape, batch_index)] + [row, column]
        permuted = list(index)
        for position, axis in enumerate(axes or range(len(shape))):
            permuted[axis] = index[position]
        return x(*permuted).astype(acc)

    def compute(*index: tvm.ir.Expr) -> tvm.ir.Expr:
        *outer, i, j = index
        left = element(a, a_shape, a_axes, tuple(outer), i, k.var)
        return te.sum(left * element(b, b_shape, b_axes, tuple(outer), k.var, j), axis=k)

    total = te.compute((*batch, a_shape[-2], b_shape[-1]), compute, name="matmul")
    return total if dtype == acc else tvm.topi.cast(total, dtype)


def _is_one(size: tvm.ir.Expr) -> bool:
    return isinstance(size, tvm.tirx.IntImm) and size.value == 1
