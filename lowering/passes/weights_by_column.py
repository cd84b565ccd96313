"""Constant matrices for GPUs, whose kernels read a column's elements at successive k (schedules/cuda/matmul_rows.py).

x W with a constant W [K, N] of half precision becomes a product with its transposition [N, K], made once, while
compiling. What a model transposes itself is read where it is (absorb_transposes.py).
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.cuda.shared_tile import CHUNK
from schedules.half_precision import HALF

from ..tensorir.expressions import Expr
from .convolutions import OUT_ELEMENTWISE_FUSABLE


def weights_by_column(mod: tvm.IRModule, weights: dict[str, np.ndarray]) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """The module with such products in `main`, and its weights: main's parameters behind the first `num_input`, those
    that nobody reads any more dropped."""
    transposer = _Transposer(mod, weights)
    main = mod["main"]
    body = transposer.visit_expr(main.body)
    inputs = list(main.params[: int(main.attrs["num_input"])])
    used = set(relax.analysis.free_vars(body))
    kept = [var for var in (*main.params[len(inputs) :], *transposer.made.values()) if var in used]
    mod = transposer.builder_.get()
    mod["main"] = relax.Function([*inputs, *kept], body, main.ret_ty, main.is_pure, main.attrs)
    arrays = {**weights, **transposer.arrays}
    return relax.transform.DeadCodeElimination()(mod), {var.name: arrays[var.name] for var in kept}


@mutator
class _Transposer(PyExprMutator):
    def __init__(self, mod: tvm.IRModule, weights: dict[str, np.ndarray]) -> None:
        super().__init__(mod)
        self.weights, self.parameters = weights, set(mod["main"].params)
        self.made: dict[str, relax.Var] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.matmul") or not isinstance(call.args[1], relax.Var):
            return call
        x, matrix = call.args[0], self.weights.get(call.args[1].name) if call.args[1] in self.parameters else None
        if matrix is None or matrix.ndim != 2 or x.ty.ndim < 1 or matrix.shape[0] % CHUNK:
            return call
        if matrix.dtype.name not in HALF or not matrix.dtype.name == x.ty.dtype == call.ty.dtype:
            return call
        return self.builder_.call_te(
            _product,
            x,
            self.by_column(call.args[1].name, matrix),
            primfunc_name_hint="matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def by_column(self, name: str, matrix: np.ndarray) -> relax.Var:
        if name not in self.made:
            new = f"{name}_columns"
            while new in self.weights:
                new += "_"
            array = np.ascontiguousarray(matrix.T)
            self.arrays[new] = array
            self.made[name] = relax.Var(new, relax.TensorType(array.shape, array.dtype.name))
        return self.made[name]


def _product(x: te.Tensor, columns: te.Tensor) -> te.Tensor:
    """x [..., K] times the transposition of [N, K], summed in float32, in the type of x."""
    k = te.reduce_axis((0, x.shape[-1]), name="k")

    def element(*index: Expr) -> Expr:
        *row, j = index
        return te.sum(x(*row, k).astype("float32") * columns(j, k).astype("float32"), axis=k)

    total = te.compute((*x.shape[:-1], columns.shape[0]), element, name="matmul")
    return tvm.topi.cast(total, x.dtype)
