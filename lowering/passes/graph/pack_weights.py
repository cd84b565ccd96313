"""Packs weights for matrix kernels, once, at compile time: here for CPUs, and in weights_by_column.py for GPUs.

A matmul x W with a constant matrix W becomes a matmul with W stored in panels (panels.py). Transposes and casts between
the weight and the matmul are applied at compile time. A weight with other readers is preserved, too. bfloat16 weights
of bfloat16 matmuls are stored in pairs of successive rows if the machine multiplies such pairs.

Quantized matrices stay integers and scales (schedules/reading/quantized_weights.py), and float ones are quantized if a
scheme is set.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import CpuFeatures, panel_width, read_cpu_features

from ...importing.quantized_matrix import QuantizedMatrix
from ..compile_state import CompileState
from .compression import Compression, prepare_matrix
from .constants import FLOATS, WeightArrays, WeightTracer, make_parameters, replace_main_body
from .convolutions import (
    OUT_ELEMENTWISE_FUSABLE,
    Convolution,
    ConvolutionGroups,
    make_grouped_convolution,
    make_implicit_matmul,
    read_convolution,
)
from .grouped_weights import GroupedCall, read_grouped_call
from .panels import (
    ElementReader,
    pack,
    pack_pairs,
    pack_quads,
    pack_quantized_matrix,
    packed_matmul,
    read_pair_element,
    read_plain_element,
    read_quad_element,
)
from .weights_by_column import pack_weights_by_column

_MIN_COLUMNS = 4  # matmuls with fewer are dot products, which need no packing


def pack_weights(state: CompileState) -> CompileState:
    """Let `main` multiply by packed weights; the state then has them in the order of its parameters.

    Only matrices of float32, float16 and bfloat16 on the right of a matmul are packed; accumulators are float32. Unused
    weights are dropped. Quantized weights with other readers become floats. With the option `scheme`, float matrices
    are compressed: int8 with a scale for each column, int4 with a scale for each column and 32 rows, or f16.
    """
    target, weights = state.target.tvm, dict(state.weights)
    compression = None if state.options.scheme is None else Compression(state.options.scheme)
    if target.kind.name == "llvm":
        mod, packed = _pack_panels(state.module, weights, read_cpu_features(target), compression)
    else:
        mod, packed = pack_weights_by_column(state.module, weights, compression, state.tensor_core_dtypes)
    notes = state.notes if compression is None else (*state.notes, compression.cost())
    return replace(state, module=mod, weights=packed, notes=notes)


def _pack_panels(
    mod: tvm.IRModule,
    weights: dict[str, np.ndarray | QuantizedMatrix],
    cpu: CpuFeatures,
    compression: Compression | None,
) -> tuple[tvm.IRModule, WeightArrays]:
    packer = _PanelPacker(mod, weights, cpu, compression)
    body = packer.visit_expr(mod["main"].body)
    new_weights = [component for components in packer.packed.values() for component in components]
    return replace_main_body(packer.builder_.get(), mod["main"], body, new_weights, weights)


@mutator
class _PanelPacker(PyExprMutator):
    """Rewrites matmuls; `packed` has the new parameters and their arrays, by weight and its transformations."""

    def __init__(
        self,
        mod: tvm.IRModule,
        weights: dict[str, np.ndarray | QuantizedMatrix],
        cpu: CpuFeatures,
        compression: Compression | None,
    ) -> None:
        super().__init__(mod)
        self.mod, self.weights = mod, weights
        self.cpu = cpu
        self.compression = compression
        self.packed: dict[tuple[str, ...], list[tuple[relax.Var, np.ndarray]]] = {}
        self.elements: dict[tuple[str, ...], ElementReader] = {}
        self.constants = WeightTracer(weights, set(mod["main"].params), self.lookup_binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        convolution = read_convolution(call)
        if convolution is not None:
            return self.pack_convolution(call, convolution)
        grouped = read_grouped_call(self.mod, call)
        if grouped is not None:
            return self.pack_grouped_matmul(call, grouped)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constants.trace(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or matrix.shape[1] < _MIN_COLUMNS or x.ty.ndim < 1:
            return call
        if types == {"uint8", "int32"} and isinstance(matrix, np.ndarray) and matrix.dtype.name == "int8":
            return self.pack_int8_matmul(x, steps, matrix)
        if not {*types, matrix.dtype.name} <= set(FLOATS):
            return call
        pairs = self.cpu.bf16_dot and matrix.dtype.name == x.ty.dtype == "bfloat16"
        if pairs:
            steps = (*steps, "pairs")
        if steps not in self.packed:
            self.pack_matrix(steps, matrix, pairs)
        return self.emit_matmul(x, steps, matrix.shape[1], str(call.ty.dtype))

    def pack_int8_matmul(self, x: relax.Expr, steps: tuple[str, ...], matrix: np.ndarray) -> relax.Expr:
        """Return an int32 matmul of int8 values, those of x unsigned."""
        steps = (*steps, "quads")
        if steps not in self.packed:
            self.elements[steps] = read_quad_element
            self.add_parameters(steps, {"packed": pack_quads(matrix, panel_width(matrix.shape[1], self.cpu, "int32"))})
        return self.emit_matmul(x, steps, matrix.shape[1], "int32")

    def emit_matmul(self, x: relax.Expr, steps: tuple[str, ...], columns: int, dtype: str) -> relax.Expr:
        """Return x times a packed matrix."""
        element = self.elements[steps]
        return self.builder_.call_te(
            lambda x, *components: packed_matmul(x, list(components), columns, dtype, element),
            x,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def pack_grouped_matmul(self, call: relax.Call, grouped: GroupedCall) -> relax.Expr:
        """Return rows times packed matrices, where each row selects one of several."""
        steps, matrices = self.constants.trace(grouped.matrices)
        if matrices is None:
            return call
        pairs = self.cpu.bf16_dot and matrices.dtype.name == grouped.rows.ty.dtype == "bfloat16"
        steps, nr = (*steps, "grouped", *(["pairs"] if pairs else [])), panel_width(grouped.columns, self.cpu)
        if steps not in self.packed:
            self.store_panels(steps, grouped.pad(prepare_matrix(matrices, self.compression), nr), pairs, nr)
        return grouped.emit(self.builder_, [var for var, _ in self.packed[steps]], self.elements[steps], nr)

    def pack_convolution(self, call: relax.Call, convolution: Convolution) -> relax.Expr:
        """Return a convolution by packed weights if they are constant; their element type is unchanged."""
        x, (steps, weights) = call.args[0], self.constants.trace(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if not isinstance(weights, np.ndarray) or not {*types, weights.dtype.name} <= set(FLOATS):
            return call
        if convolution.groups > 1:
            return self.pack_grouped_convolution(call, convolution, steps, weights)
        matrix = weights.reshape(-1, weights.shape[-1])
        pairs = self.cpu.bf16_dot and matrix.dtype.name == x.ty.dtype == "bfloat16"
        steps = (*steps, "patches", *(["pairs"] if pairs else []))
        if steps not in self.packed:
            self.store_panels(steps, matrix, pairs, panel_width(matrix.shape[1], self.cpu))
        element = self.elements[steps]
        return self.builder_.call_te(
            lambda x, shape, *components: make_implicit_matmul(
                convolution, x, shape, functools.partial(element, list(components))
            ),
            x,
            call.ty.shape,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def pack_grouped_convolution(
        self, call: relax.Call, convolution: Convolution, steps: tuple[str, ...], weights: np.ndarray
    ) -> relax.Expr:
        groups = ConvolutionGroups.choose(
            convolution.groups, weights.shape[-1] // convolution.groups, self.cpu.lanes("float32")
        )
        steps = (*steps, "groups")
        if steps not in self.packed:
            matrices = groups.make_matrices(weights)
            nr = panel_width(matrices[0].shape[1], self.cpu)
            self.add_parameters(steps, {"packed": np.stack([pack(matrix, nr) for matrix in matrices])})
        matmuls = self.builder_.call_te(
            lambda x, shape, panels: make_grouped_convolution(convolution, groups, x, shape, panels),
            call.args[0],
            call.ty.shape,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )
        return relax.op.reshape(self.builder_.emit(matmuls), call.ty.shape)

    def pack_matrix(self, steps: tuple[str, ...], matrix: np.ndarray | QuantizedMatrix, pairs: bool) -> None:
        """Store a matrix [K, N] in panels, compressed if a scheme is set."""
        self.store_panels(
            steps, prepare_matrix(matrix, self.compression), pairs, panel_width(matrix.shape[1], self.cpu)
        )

    def store_panels(self, steps: tuple[str, ...], matrix: np.ndarray | QuantizedMatrix, pairs: bool, nr: int) -> None:
        """Store a matrix [K, N] in panels of nr columns, of pairs of rows if `pairs` is set."""
        if isinstance(matrix, QuantizedMatrix):
            components, self.elements[steps] = pack_quantized_matrix(matrix, nr)
        elif pairs:
            components, self.elements[steps] = {"packed": pack_pairs(matrix, nr)}, read_pair_element
        else:
            components, self.elements[steps] = {"packed": pack(matrix, nr)}, read_plain_element
        self.add_parameters(steps, components)

    def add_parameters(self, steps: tuple[str, ...], components: Mapping[str, np.ndarray]) -> None:
        """Add the components of the weight that `steps` names as new parameters."""
        self.packed[steps] = make_parameters(steps, components, self.weights)
