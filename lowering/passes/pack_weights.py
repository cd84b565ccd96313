"""Packs weights for the CPU's matrix kernel, once, while compiling.

A product x W with a constant matrix W becomes a product with W stored in panels (schedules/cpu/matmul.py): panel p
holds columns p * nr .. p * nr + nr - 1, and the nr elements of each row are consecutive. Columns behind the last are
zeros. Transposes and casts between the weight and the product are done on the way. A weight that has other readers is
kept too.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.cpu.matmul import panel_width
from schedules.cpu.vector import Machine, machine

Weights = dict[str, np.ndarray]

_FLOATS = ("float32", "float16", "bfloat16")
_OUT_ELEMENTWISE_FUSABLE = 4  # TVM's pattern kind of a product: element-wise operations behind it fuse with it
_MIN_COLUMNS = 4  # products with fewer are dot products: nothing to pack


def pack_weights(mod: tvm.IRModule, weights: Weights, target: tvm.target.Target) -> tuple[tvm.IRModule, Weights]:
    """The module with `main` multiplying by packed weights, and its weights in the order of its parameters.

    weights holds main's parameters behind the first `num_input`, by name; those that nobody reads any more are dropped.
    Only matrices of float32, float16 and bfloat16 on the right of a product are packed, and only for CPUs; sums are in
    float32.
    """
    if target.kind.name != "llvm":
        return mod, weights
    packer = _Packer(mod, weights, machine(target))
    main = mod["main"]
    body = packer.visit_expr(main.body)
    inputs = list(main.params[: int(main.attrs["num_input"])])
    candidates = list(main.params[len(inputs) :]) + [var for var, _ in packer.packed.values()]
    arrays = {**weights, **{var.name: array for var, array in packer.packed.values()}}
    mod = packer.builder_.get()
    mod["main"] = relax.Function([*inputs, *candidates], body, main.ret_ty, main.is_pure, main.attrs)
    mod = relax.transform.DeadCodeElimination()(mod)
    return _drop_unused(mod, len(inputs), arrays)


def _drop_unused(mod: tvm.IRModule, inputs: int, arrays: Weights) -> tuple[tvm.IRModule, Weights]:
    main = mod["main"]
    used = set(relax.analysis.free_vars(main.body))
    kept = [var for var in main.params[inputs:] if var in used]
    params = [*main.params[:inputs], *kept]
    mod["main"] = relax.Function(params, main.body, main.ret_ty, main.is_pure, main.attrs)
    return mod, {var.name: arrays[var.name] for var in kept}


@mutator
class _Packer(PyExprMutator):
    """Rewrites products; `packed` holds the new parameters and their contents, by weight and what was done to it."""

    def __init__(self, mod: tvm.IRModule, weights: Weights, cpu: Machine) -> None:
        super().__init__(mod)
        self.weights = weights
        self.cpu = cpu
        self.packed: dict[tuple[str, ...], tuple[relax.Var, np.ndarray]] = {}
        self.parameters = set(mod["main"].params)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constant(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or matrix.shape[1] < _MIN_COLUMNS or x.ty.ndim < 1:
            return call
        if not {*types, matrix.dtype.name} <= set(_FLOATS):
            return call
        if steps not in self.packed:
            panels = pack(matrix, panel_width(matrix.shape[1], self.cpu))
            name = "_".join((*steps, "packed"))
            while name in self.weights:
                name += "_"
            var = relax.Var(name, relax.TensorType(panels.shape, panels.dtype.name))
            self.packed[steps] = var, panels
        return self.builder_.call_te(
            packed_matmul,
            x,
            self.packed[steps][0],
            matrix.shape[1],
            str(call.ty.dtype),
            primfunc_name_hint="packed_matmul",
            primfunc_attrs={"op_pattern": _OUT_ELEMENTWISE_FUSABLE},
        )

    def constant(self, expr: relax.Expr) -> tuple[tuple[str, ...], np.ndarray | None]:
        """The weight that `expr` is made from, with the name and what was done to it; None when there is more to it."""
        if isinstance(expr, relax.Var) and expr in self.parameters:
            name = expr.name
            return (name,), self.weights.get(name)
        bound = self.lookup_binding(expr) if isinstance(expr, relax.Var) else expr
        if isinstance(bound, relax.Var):
            return self.constant(bound)
        if isinstance(bound, relax.Call) and isinstance(bound.op, tvm.ir.Op):
            steps, array = self.constant(bound.args[0]) if bound.args else ((), None)
            if array is not None and bound.op.name == "relax.permute_dims" and array.ndim == 2:
                axes = bound.attrs.axes
                axes = (1, 0) if axes is None else tuple(int(axis) for axis in axes)
                return (*steps, f"permuted_{axes[0]}{axes[1]}"), array.transpose(axes)
            if array is not None and bound.op.name == "relax.astype" and str(bound.attrs.dtype) in _FLOATS:
                dtype = str(bound.attrs.dtype)
                return (*steps, dtype), array.astype(np.dtype(dtype))
        return (), None


def pack(matrix: np.ndarray, nr: int) -> np.ndarray:
    """[K, N] to panels [ceil(N / nr), K, nr], zeros behind column N."""
    rows, columns = matrix.shape
    panels = -(-columns // nr)
    padded = np.zeros((rows, panels * nr), matrix.dtype)
    padded[:, :columns] = matrix
    return np.ascontiguousarray(padded.reshape(rows, panels, nr).transpose(1, 0, 2))


def packed_matmul(x: te.Tensor, panels: te.Tensor, columns: int, dtype: str) -> te.Tensor:
    """x [..., K] times a matrix [K, columns] that is stored in panels [ceil(columns / nr), K, nr], in `dtype`."""
    _, depth, nr = panels.shape
    k = te.reduce_axis((0, depth), name="k")

    def element(*index: tvm.ir.Expr) -> tvm.ir.Expr:
        *row, j = index
        product = x(*row, k).astype("float32") * panels(j // nr, k, j % nr).astype("float32")
        return te.sum(product, axis=k)

    total = te.compute((*x.shape[:-1], columns), element, name="matmul")
    return total if dtype == "float32" else topi.cast(total, dtype)
