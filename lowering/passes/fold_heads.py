"""Attention and cache updates that find heads where they are: behind their rows, as matmuls leave them.

Models split the columns of a matmul into heads and transpose, as Attention and TensorScatter want heads before rows,
and transpose what comes out. Kernels read and write rows in any order, so that nothing need be moved.
"""

from __future__ import annotations

import dataclasses

import tvm
from tvm import ir, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from ..importing.origins import Origins
from ..tensorir.scatter import ATTRIBUTE, CacheUpdate, copy_and_update
from .folding import Attention
from .main_function import rewritten

_TURNED = [0, 2, 1, 3]  # its own inverse
_PERMUTE, _CALL_TIR, _CALL_PACKED = map(ir.Op.get, ("relax.permute_dims", "relax.call_tir", "relax.call_pure_packed"))


def fold_heads(mod: tvm.IRModule, origins: Origins) -> tuple[tvm.IRModule, Origins]:
    """The module, and where its calls come from; transpositions that nobody reads any more are left to the elimination
    of dead code."""
    folding = _Folder(mod, origins)
    return rewritten(mod, folding), folding.origins


@mutator
class _Folder(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, origins: Origins) -> None:
        super().__init__(mod)
        self.mod, self.origins, self.result = mod, dict(origins), ""

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.result = binding.var.name
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op == _PERMUTE:
            source = self.turned(call.args[0]) if _axes(call) == _TURNED else None
            return call if source is None else source
        if call.op != _CALL_TIR:
            return call
        attention = Attention.of(self.mod, call)
        if attention is not None:
            return self.attention(attention)
        attrs = self.mod[call.args[0]].attrs
        return self.update(call, str(attrs[ATTRIBUTE])) if attrs is not None and ATTRIBUTE in attrs else call

    def attention(self, attention: Attention) -> relax.Expr:
        """One whose Q was transposed reads it as it was before, and Y is transposed behind it instead."""
        problem, q = attention.problem, attention.arguments["q"]
        rows = self.turned(q) if problem.row_axes == "bhtd" and problem.outputs() == ("y",) else None
        if rows is None:
            return attention.call
        inside = dataclasses.replace(problem, row_axes="bthd")
        size = attention.call.ty_args[0]
        shape = [size.shape.values[axis] for axis in _TURNED]
        new = attention.solving(
            self.builder_, inside, attention.arguments | {"q": rows}, relax.TensorType(shape, size.dtype)
        )
        rows = self.builder_.emit(new, "heads")
        self.origins[rows.name] = self.origins.get(self.result, ())
        return relax.op.permute_dims(rows, _TURNED)

    def update(self, call: relax.Call, record: str) -> relax.Expr:
        """One whose new rows were transposed."""
        update, (cache, rows, *rest) = CacheUpdate.from_json(record), call.args[1].fields
        source = self.turned(rows) if (update.axis, len(update.dims), update.rows_first) == (2, 4, False) else None
        if source is None:
            return call
        function = copy_and_update(dataclasses.replace(update, rows_first=True)).without_attr("global_symbol")
        variable = self.builder_.add_func(function, "update_cache")
        return relax.call_tir(variable, [cache, source, *rest], call.ty_args[0])

    def turned(self, x: relax.Expr) -> relax.Expr | None:
        """What x is the transposition of, with the checks that x went through; None if it is none."""
        bound = self.lookup_binding(x) if isinstance(x, relax.Var) else x
        if not isinstance(bound, relax.Call):
            return None
        if bound.op == _PERMUTE:
            return bound.args[0] if _axes(bound) == _TURNED else None
        if bound.op != _CALL_PACKED or bound.args[0].global_symbol != "lowering_check":
            return None
        source = self.turned(bound.args[1])
        if source is None:
            return None
        check = relax.op.call_pure_packed(bound.args[0], source, *bound.args[2:], ty_args=source.ty)
        return self.builder_.emit(check, "checked")


def _axes(call: relax.Call) -> list[int] | None:
    return None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
