"""Constant matrices for GPUs, whose kernels read a column's elements at successive k
(schedules/cuda/small_m_matmul.py).

x W with a constant W [K, N] becomes a matmul with its columns, one behind the other, stored while compiling: where W
is of a type that tensor cores multiply, or integers with scales, which stay so and are expanded on the way there. What
a model transposes itself is read where it is (fold_transposes.py), but for what is compressed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.cuda.ptx import CHUNK_BYTES

from ..importing.quantized import Quantized
from .compression import Compression, stored
from .constants import FLOATS, Constants, Weights, parameters_for, with_parameters
from .convolutions import OUT_ELEMENTWISE_FUSABLE
from .grouped_weights import GroupedCall, read_grouped
from .panels import Element, codes_in_panels, pack, packed_matmul, plain_element


def weights_by_column(
    mod: tvm.IRModule,
    weights: dict[str, np.ndarray | Quantized],
    compression: Compression | None,
    on_tensor_cores: Sequence[str],
) -> tuple[tvm.IRModule, Weights]:
    """The module with such matmuls in `main`, and its weights; see `with_parameters`."""
    packer = _Packer(mod, weights, compression, on_tensor_cores)
    body = packer.visit_expr(mod["main"].body)
    made = [part for parts in packer.made.values() for part in parts]
    return with_parameters(packer.builder_.get(), mod["main"], body, made, weights)


@mutator
class _Packer(PyExprMutator):
    """Rewrites matmuls; `made` are the new parameters and their contents, by what a matrix is made from: none of a
    matrix that stays where it is."""

    def __init__(
        self,
        mod: tvm.IRModule,
        weights: dict[str, np.ndarray | Quantized],
        compression: Compression | None,
        on_tensor_cores: Sequence[str],
    ) -> None:
        super().__init__(mod)
        self.mod, self.weights, self.compression, self.on_tensor_cores = mod, weights, compression, on_tensor_cores
        self.constants = Constants(weights, set(mod["main"].params), self.lookup_binding)
        self.made: dict[tuple[str, ...], list[tuple[relax.Var, np.ndarray]]] = {}
        self.elements: dict[tuple[str, ...], Element] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        grouped = read_grouped(self.mod, call)
        if grouped is not None:
            return self.grouped_matmul(call, grouped)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constants.of(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or x.ty.ndim < 1 or not types <= set(FLOATS):
            return call
        if steps not in self.made:
            self.made[steps] = parameters_for(steps, self.parts(steps, matrix, str(x.ty.dtype)), self.weights)
        if not self.made[steps]:
            return call
        element, columns, dtype = self.elements[steps], matrix.shape[1], str(call.ty.dtype)
        return self.builder_.call_te(
            lambda x, *parts: packed_matmul(x, list(parts), columns, dtype, element),
            x,
            *(var for var, _ in self.made[steps]),
            primfunc_name_hint="matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def grouped_matmul(self, call: relax.Call, grouped: GroupedCall) -> relax.Expr:
        """Rows times the one of several stored matrices that each of them chooses."""
        steps, matrices = self.constants.of(grouped.matrices)
        if matrices is None:
            return call
        if steps not in self.made:
            matrices = stored(matrices, self.compression)
            if isinstance(matrices, Quantized):
                parts, self.elements[steps] = codes_in_panels(matrices, 1)
            else:
                parts, self.elements[steps] = {"columns": pack(matrices, 1)}, plain_element
            self.made[steps] = parameters_for(steps, parts, self.weights)
        return grouped.emit(self.builder_, [var for var, _ in self.made[steps]], self.elements[steps], 1)

    def parts(self, steps: tuple[str, ...], matrix: np.ndarray | Quantized, dtype: str) -> Weights:
        """What a matrix [K, N] that an x of that type is multiplied by is stored as; nothing where it stays."""
        matrix = stored(matrix, self.compression)
        if isinstance(matrix, Quantized):
            parts, self.elements[steps] = codes_in_panels(matrix, 1)
            return parts
        compressed = self.compression is not None and matrix.dtype == np.float16 != np.dtype(dtype)
        whole = matrix.shape[0] * matrix.dtype.itemsize % CHUNK_BYTES == 0
        together = matrix.dtype.name == dtype and dtype in self.on_tensor_cores and whole and len(steps) == 1
        self.elements[steps] = plain_element
        return {"columns": pack(matrix, 1)} if compressed or together else {}
