"""Attention and cache updates read heads in the layout of matmul results: after the rows.

Models split the columns of a matmul into heads and transpose, as Attention and TensorScatter expect heads before rows,
and transpose the results. Kernels read and write rows in any order, so no data needs to be moved.
"""

from __future__ import annotations

import dataclasses

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ...importing.origins import Origins
from ...tensorir.scatter import ATTRIBUTE, CacheUpdate, make_copying_update
from ..compile_state import CompileState
from ..main_function import rewrite_main
from .folding import AttentionCall

_SWAP_HEADS = [0, 2, 1, 3]  # its own inverse
_PERMUTE, _CALL_TIR, _CALL_PACKED = map(ir.Op.get, ("relax.permute_dims", "relax.call_tir", "relax.call_pure_packed"))


def fold_heads(state: CompileState) -> CompileState:
    """Fold transpositions of heads into attention; unused ones are left to dead code elimination."""
    folder = _HeadFolder(state.module, state.origins)
    return dataclasses.replace(state, module=rewrite_main(state.module, folder), origins=folder.origins)


@mutator
class _HeadFolder(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, origins: Origins) -> None:
        super().__init__(mod)
        self.mod, self.origins, self.result = mod, dict(origins), ""

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.result = binding.var.name
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op == _PERMUTE:
            source = self.find_untransposed(call.args[0]) if _get_axes(call) == _SWAP_HEADS else None
            return call if source is None else source
        if call.op != _CALL_TIR:
            return call
        attention = AttentionCall.read(self.mod, call)
        if attention is not None:
            return self.fold_attention(attention)
        attrs = self.mod[call.args[0]].attrs
        return self.fold_update(call, str(attrs[ATTRIBUTE])) if attrs is not None and ATTRIBUTE in attrs else call

    def fold_attention(self, attention: AttentionCall) -> relax.Expr:
        """Make an attention with a transposed Q read it untransposed, and transpose Y after it instead."""
        problem, q = attention.problem, attention.arguments["q"]
        rows = self.find_untransposed(q) if problem.row_axes == "bhtd" and problem.outputs() == ("y",) else None
        if rows is None:
            return attention.call
        inside = dataclasses.replace(problem, row_axes="bthd")
        size = attention.call.ty_args[0]
        shape = [size.shape.values[axis] for axis in _SWAP_HEADS]
        new = attention.call_problem(
            self.builder_, inside, attention.arguments | {"q": rows}, relax.TensorType(shape, size.dtype)
        )
        rows = self.builder_.emit(new, "heads")
        self.origins[rows.name] = self.origins.get(self.result, ())
        return relax.op.permute_dims(rows, _SWAP_HEADS)

    def fold_update(self, call: relax.Call, record: str) -> relax.Expr:
        """Make a cache update with transposed new rows read them untransposed."""
        update, (cache, rows, *rest) = CacheUpdate.from_json(record), call.args[1].fields
        source = (
            self.find_untransposed(rows)
            if (update.axis, len(update.dims), update.rows_first) == (2, 4, False)
            else None
        )
        if source is None:
            return call
        function = make_copying_update(dataclasses.replace(update, rows_first=True)).without_attr("global_symbol")
        variable = self.builder_.add_func(function, "update_cache")
        return relax.call_tir(variable, [cache, source, *rest], call.ty_args[0])

    def find_untransposed(self, x: relax.Expr) -> relax.Expr | None:
        """Return the source of which x is the transposition, with the checks of x; None if it is not transposed."""
        bound = self.lookup_binding(x) if isinstance(x, relax.Var) else x
        if not isinstance(bound, relax.Call):
            return None
        if bound.op == _PERMUTE:
            return bound.args[0] if _get_axes(bound) == _SWAP_HEADS else None
        if bound.op != _CALL_PACKED or bound.args[0].global_symbol != "lowering_check":
            return None
        source = self.find_untransposed(bound.args[1])
        if source is None:
            return None
        check = relax.op.call_pure_packed(bound.args[0], source, *bound.args[2:], ty_args=source.ty)
        return self.builder_.emit(check, "checked")


def _get_axes(call: relax.Call) -> list[int] | None:
    return None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
