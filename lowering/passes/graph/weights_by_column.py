"""Constant matrices for GPUs: kernels read a column's elements at successive k
(schedules/cuda/matmul/small_m_matmul.py).

x W with a constant W [K, N] becomes a matmul with its columns concatenated, stored at compile time. This applies if W
has a type that tensor cores multiply, or is quantized; quantized values are dequantized in the kernel. A weight that
the model transposes itself is read without a copy (fold_transposes.py), unless it is compressed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import CHUNK_BYTES

from ...importing.quantized_matrix import QuantizedMatrix
from .compression import Compression, prepare_matrix
from .constants import FLOATS, WeightArrays, WeightTracer, make_parameters, replace_main_body
from .convolutions import OUT_ELEMENTWISE_FUSABLE
from .grouped_weights import GroupedCall, read_grouped_call
from .panels import ElementReader, pack, pack_quantized_matrix, packed_matmul, read_plain_element


def pack_weights_by_column(
    mod: tvm.IRModule,
    weights: dict[str, np.ndarray | QuantizedMatrix],
    compression: Compression | None,
    on_tensor_cores: Sequence[str],
) -> tuple[tvm.IRModule, WeightArrays]:
    """Return the module with such matmuls in `main`, and its weights; see `replace_main_body`."""
    packer = _ColumnPacker(mod, weights, compression, on_tensor_cores)
    body = packer.visit_expr(mod["main"].body)
    new_weights = [component for components in packer.packed.values() for component in components]
    return replace_main_body(packer.builder_.get(), mod["main"], body, new_weights, weights)


@mutator
class _ColumnPacker(PyExprMutator):
    """Rewrites matmuls.

    `packed` are the new parameters and their arrays, by the steps of a matrix: none for a matrix that is not packed.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        weights: dict[str, np.ndarray | QuantizedMatrix],
        compression: Compression | None,
        on_tensor_cores: Sequence[str],
    ) -> None:
        super().__init__(mod)
        self.mod, self.weights, self.compression, self.on_tensor_cores = mod, weights, compression, on_tensor_cores
        self.constants = WeightTracer(weights, set(mod["main"].params), self.lookup_binding)
        self.packed: dict[tuple[str, ...], list[tuple[relax.Var, np.ndarray]]] = {}
        self.elements: dict[tuple[str, ...], ElementReader] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        grouped = read_grouped_call(self.mod, call)
        if grouped is not None:
            return self.pack_grouped_matmul(call, grouped)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constants.trace(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or x.ty.ndim < 1 or not types <= set(FLOATS):
            return call
        if steps not in self.packed:
            self.packed[steps] = make_parameters(
                steps, self.store_columns(steps, matrix, str(x.ty.dtype)), self.weights
            )
        if not self.packed[steps]:
            return call
        element, columns, dtype = self.elements[steps], matrix.shape[1], str(call.ty.dtype)
        return self.builder_.call_te(
            lambda x, *components: packed_matmul(x, list(components), columns, dtype, element),
            x,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def pack_grouped_matmul(self, call: relax.Call, grouped: GroupedCall) -> relax.Expr:
        """Return rows times stored matrices, where each row selects one of several."""
        steps, matrices = self.constants.trace(grouped.matrices)
        if matrices is None:
            return call
        if steps not in self.packed:
            matrices = prepare_matrix(matrices, self.compression)
            if isinstance(matrices, QuantizedMatrix):
                components, self.elements[steps] = pack_quantized_matrix(matrices, 1)
            else:
                components, self.elements[steps] = {"columns": pack(matrices, 1)}, read_plain_element
            self.packed[steps] = make_parameters(steps, components, self.weights)
        return grouped.emit(self.builder_, [var for var, _ in self.packed[steps]], self.elements[steps], 1)

    def store_columns(self, steps: tuple[str, ...], matrix: np.ndarray | QuantizedMatrix, dtype: str) -> WeightArrays:
        """Return the stored components of a matrix [K, N] for an x of that type; {} if it is not packed."""
        matrix = prepare_matrix(matrix, self.compression)
        if isinstance(matrix, QuantizedMatrix):
            components, self.elements[steps] = pack_quantized_matrix(matrix, 1)
            return components
        compressed = self.compression is not None and matrix.dtype == np.float16 != np.dtype(dtype)
        is_aligned = matrix.shape[0] * matrix.dtype.itemsize % CHUNK_BYTES == 0
        is_packable = matrix.dtype.name == dtype and dtype in self.on_tensor_cores and is_aligned and len(steps) == 1
        self.elements[steps] = read_plain_element
        return {"columns": pack(matrix, 1)} if compressed or is_packable else {}
