"""Constant matrices for GPUs, whose kernels read a column's elements at successive k (schedules/cuda/matmul_rows.py).

x W with a constant W [K, N] becomes a product with its columns, one behind the other, stored while compiling: where W
is of half precision, or integers with scales, which stay so and are expanded on the way to tensor cores. What a model
transposes itself is read where it is (absorb_transposes.py), but for what is compressed.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.cuda.shared_tile import CHUNK
from schedules.half_precision import HALF

from ..importing.quantised import Quantised
from .compression import MIN_BLOCK, Compression, plain
from .constants import FLOATS, Constants
from .convolutions import OUT_ELEMENTWISE_FUSABLE
from .panels import Element, codes_in_panels, pack, packed_matmul, plain_element

Weights = dict[str, np.ndarray]


def weights_by_column(
    mod: tvm.IRModule, weights: dict[str, np.ndarray | Quantised], compression: Compression | None
) -> tuple[tvm.IRModule, Weights]:
    """The module with such products in `main`, and its weights: main's parameters behind the first `num_input`, those
    that nobody reads any more dropped. Quantised weights with other readers become floats."""
    packer = _Packer(mod, weights, compression)
    main = mod["main"]
    body = packer.visit_expr(main.body)
    inputs = list(main.params[: int(main.attrs["num_input"])])
    used = set(relax.analysis.free_vars(body))
    made = [var for parts in packer.made.values() for var in parts]
    kept = [var for var in (*main.params[len(inputs) :], *made) if var in used]
    mod = packer.builder_.get()
    mod["main"] = relax.Function([*inputs, *kept], body, main.ret_ty, main.is_pure, main.attrs)
    arrays = {**weights, **packer.arrays}
    return relax.transform.DeadCodeElimination()(mod), {var.name: plain(arrays[var.name]) for var in kept}


@mutator
class _Packer(PyExprMutator):
    """Rewrites products; `made` are the new parameters and `arrays` their contents, by what a matrix is made from."""

    def __init__(
        self, mod: tvm.IRModule, weights: dict[str, np.ndarray | Quantised], compression: Compression | None
    ) -> None:
        super().__init__(mod)
        self.weights, self.compression = weights, compression
        self.constants = Constants(weights, set(mod["main"].params), self.lookup_binding)
        self.made: dict[tuple[str, ...], list[relax.Var]] = {}
        self.elements: dict[tuple[str, ...], Element] = {}
        self.arrays: Weights = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constants.of(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or x.ty.ndim < 1 or not types <= set(FLOATS):
            return call
        if steps not in self.made and not self.keep(steps, matrix, str(x.ty.dtype)):
            return call
        element, columns, dtype = self.elements[steps], matrix.shape[1], str(call.ty.dtype)
        return self.builder_.call_te(
            lambda x, *parts: packed_matmul(x, list(parts), columns, dtype, element),
            x,
            *self.made[steps],
            primfunc_name_hint="matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def keep(self, steps: tuple[str, ...], matrix: np.ndarray | Quantised, dtype: str) -> bool:
        """Stores a matrix [K, N] that an x of that type is multiplied by; False where it stays where it is."""
        if isinstance(matrix, np.ndarray) and self.compression is not None:
            matrix = self.compression.compress(matrix)
        if isinstance(matrix, Quantised) and min(matrix.block[0], matrix.shape[0]) < MIN_BLOCK:
            matrix = matrix.array()
        if isinstance(matrix, Quantised):
            parts, self.elements[steps] = codes_in_panels(matrix, 1)
        else:
            compressed = self.compression is not None and matrix.dtype == np.float16 != np.dtype(dtype)
            together = matrix.dtype.name == dtype and dtype in HALF and matrix.shape[0] % CHUNK == 0 and len(steps) == 1
            if not compressed and not together:
                return False
            parts, self.elements[steps] = {"columns": pack(matrix, 1)}, plain_element
        self.made[steps] = []
        for part, array in parts.items():
            name = "_".join((*steps, part))
            while name in self.weights:
                name += "_"
            self.arrays[name] = array
            self.made[steps].append(relax.Var(name, relax.TensorType(array.shape, array.dtype.name)))
        return True
