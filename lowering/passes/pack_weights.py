"""Packs weights for matrix kernels, once, while compiling: here for CPUs, and in weights_by_column.py for GPUs.

A matmul x W with a constant matrix W becomes a matmul with W stored in panels (panels.py). Transposes and casts
between the weight and the matmul are done on the way. A weight that has other readers is kept too. bfloat16 that meets
bfloat16 is stored in pairs of successive rows where the machine multiplies such pairs.

Quantized matrices stay integers and scales (schedules/reading/codes.py), and float ones become so when a scheme is
asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules.cpu.panels import panel_width
from schedules.cpu.vector import Machine, machine
from schedules.half_precision import HALF

from ..choices import Scheme
from ..importing.quantized import Quantized
from .compression import Compression, stored
from .constants import FLOATS, Constants, Weights, parameters_for, with_parameters
from .convolutions import (
    OUT_ELEMENTWISE_FUSABLE,
    Convolution,
    Groups,
    grouped_matmul,
    implicit_matmul,
    read_convolution,
)
from .grouped_weights import GroupedCall, read_grouped
from .panels import (
    Element,
    codes_in_panels,
    element_of_pair,
    element_of_quad,
    pack,
    pack_pairs,
    pack_quads,
    packed_matmul,
    plain_element,
)
from .weights_by_column import weights_by_column

_MIN_COLUMNS = 4  # matmuls with fewer are dot products: nothing to pack


def pack_weights(
    mod: tvm.IRModule,
    weights: dict[str, np.ndarray | Quantized],
    target: tvm.target.Target,
    scheme: Scheme | None = None,
    notes: list[str] | None = None,
    on_tensor_cores: Sequence[str] = HALF,
) -> tuple[tvm.IRModule, Weights]:
    """The module with `main` multiplying by packed weights, and its weights in the order of its parameters.

    weights holds main's parameters behind the first `num_input`, by name; those that nobody reads any more are dropped.
    Only matrices of float32, float16 and bfloat16 on the right of a matmul are packed; sums are in float32. scheme
    says what float matrices become: int8 with a scale for each column, int4 with a scale for each column and 32 rows,
    or f16. What that cost is said in `notes`. Quantized weights with other readers become floats. on_tensor_cores are
    the types of elements that a GPU's multiply.
    """
    compression = None if scheme is None else Compression(scheme)
    if target.kind.name == "llvm":
        mod, packed = _by_panel(mod, weights, machine(target), compression)
    else:
        mod, packed = weights_by_column(mod, weights, compression, on_tensor_cores)
    if compression is not None and notes is not None:
        notes.append(compression.cost())
    return mod, packed


def _by_panel(
    mod: tvm.IRModule, weights: dict[str, np.ndarray | Quantized], cpu: Machine, compression: Compression | None
) -> tuple[tvm.IRModule, Weights]:
    packer = _Packer(mod, weights, cpu, compression)
    body = packer.visit_expr(mod["main"].body)
    made = [part for parts in packer.packed.values() for part in parts]
    return with_parameters(packer.builder_.get(), mod["main"], body, made, weights)


@mutator
class _Packer(PyExprMutator):
    """Rewrites matmuls; `packed` holds the new parameters and their contents, by weight and what was done to it."""

    def __init__(
        self,
        mod: tvm.IRModule,
        weights: dict[str, np.ndarray | Quantized],
        cpu: Machine,
        compression: Compression | None,
    ) -> None:
        super().__init__(mod)
        self.mod, self.weights = mod, weights
        self.cpu = cpu
        self.compression = compression
        self.packed: dict[tuple[str, ...], list[tuple[relax.Var, np.ndarray]]] = {}
        self.element: dict[tuple[str, ...], Element] = {}
        self.constants = Constants(weights, set(mod["main"].params), self.lookup_binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        convolution = read_convolution(call)
        if convolution is not None:
            return self.convolved(call, convolution)
        grouped = read_grouped(self.mod, call)
        if grouped is not None:
            return self.grouped_matmul(call, grouped)
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        x, (steps, matrix) = call.args[0], self.constants.of(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if matrix is None or matrix.ndim != 2 or matrix.shape[1] < _MIN_COLUMNS or x.ty.ndim < 1:
            return call
        if types == {"uint8", "int32"} and isinstance(matrix, np.ndarray) and matrix.dtype.name == "int8":
            return self.matmul_of_bytes(x, steps, matrix)
        if not {*types, matrix.dtype.name} <= set(FLOATS):
            return call
        pairs = self.cpu.bf16_dot and matrix.dtype.name == x.ty.dtype == "bfloat16"
        if pairs:
            steps = (*steps, "pairs")
        if steps not in self.packed:
            self.pack(steps, matrix, pairs)
        return self.matmul(x, steps, matrix.shape[1], str(call.ty.dtype))

    def matmul_of_bytes(self, x: relax.Expr, steps: tuple[str, ...], matrix: np.ndarray) -> relax.Expr:
        """A matmul in int32 of bytes, those of x without a sign."""
        steps = (*steps, "quads")
        if steps not in self.packed:
            self.element[steps] = element_of_quad
            self.keep(steps, {"packed": pack_quads(matrix, panel_width(matrix.shape[1], self.cpu, "int32"))})
        return self.matmul(x, steps, matrix.shape[1], "int32")

    def matmul(self, x: relax.Expr, steps: tuple[str, ...], columns: int, dtype: str) -> relax.Expr:
        """x times a packed matrix."""
        element = self.element[steps]
        return self.builder_.call_te(
            lambda x, *parts: packed_matmul(x, list(parts), columns, dtype, element),
            x,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_matmul",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def grouped_matmul(self, call: relax.Call, grouped: GroupedCall) -> relax.Expr:
        """Rows times the one of several packed matrices that each of them chooses."""
        steps, matrices = self.constants.of(grouped.matrices)
        if matrices is None:
            return call
        pairs = self.cpu.bf16_dot and matrices.dtype.name == grouped.rows.ty.dtype == "bfloat16"
        steps, nr = (*steps, "grouped", *(["pairs"] if pairs else [])), panel_width(grouped.columns, self.cpu)
        if steps not in self.packed:
            self.store(steps, grouped.pad(stored(matrices, self.compression), nr), pairs, nr)
        return grouped.emit(self.builder_, [var for var, _ in self.packed[steps]], self.element[steps], nr)

    def convolved(self, call: relax.Call, convolution: Convolution) -> relax.Expr:
        """A convolution, by packed weights where they are constant; elements of theirs stay what they are."""
        x, (steps, weights) = call.args[0], self.constants.of(call.args[1])
        types = {str(x.ty.dtype), str(call.ty.dtype)}
        if not isinstance(weights, np.ndarray) or not {*types, weights.dtype.name} <= set(FLOATS):
            return call
        if convolution.groups > 1:
            return self.grouped(call, convolution, steps, weights)
        matrix = weights.reshape(-1, weights.shape[-1])
        pairs = self.cpu.bf16_dot and matrix.dtype.name == x.ty.dtype == "bfloat16"
        steps = (*steps, "patches", *(["pairs"] if pairs else []))
        if steps not in self.packed:
            self.store(steps, matrix, pairs, panel_width(matrix.shape[1], self.cpu))
        element = self.element[steps]
        return self.builder_.call_te(
            lambda x, shape, *parts: implicit_matmul(convolution, x, shape, functools.partial(element, list(parts))),
            x,
            call.ty.shape,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )

    def grouped(
        self, call: relax.Call, convolution: Convolution, steps: tuple[str, ...], weights: np.ndarray
    ) -> relax.Expr:
        groups = Groups.of(convolution.groups, weights.shape[-1] // convolution.groups, self.cpu.lanes("float32"))
        steps = (*steps, "groups")
        if steps not in self.packed:
            matrices = groups.matrices(weights)
            nr = panel_width(matrices[0].shape[1], self.cpu)
            self.keep(steps, {"packed": np.stack([pack(matrix, nr) for matrix in matrices])})
        matmuls = self.builder_.call_te(
            lambda x, shape, panels: grouped_matmul(convolution, groups, x, shape, panels),
            call.args[0],
            call.ty.shape,
            *(var for var, _ in self.packed[steps]),
            primfunc_name_hint="packed_convolution",
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )
        return relax.op.reshape(self.builder_.emit(matmuls), call.ty.shape)

    def pack(self, steps: tuple[str, ...], matrix: np.ndarray | Quantized, pairs: bool) -> None:
        """Stores a matrix [K, N], compressed if asked for, in panels."""
        self.store(steps, stored(matrix, self.compression), pairs, panel_width(matrix.shape[1], self.cpu))

    def store(self, steps: tuple[str, ...], matrix: np.ndarray | Quantized, pairs: bool, nr: int) -> None:
        """Stores a matrix [K, N] in panels of nr columns, of pairs of rows if asked for."""
        if isinstance(matrix, Quantized):
            parts, self.element[steps] = codes_in_panels(matrix, nr)
        elif pairs:
            parts, self.element[steps] = {"packed": pack_pairs(matrix, nr)}, element_of_pair
        else:
            parts, self.element[steps] = {"packed": pack(matrix, nr)}, plain_element
        self.keep(steps, parts)

    def keep(self, steps: tuple[str, ...], parts: Mapping[str, np.ndarray]) -> None:
        """Makes new parameters of arrays, by what they are of the weight that `steps` names."""
        self.packed[steps] = parameters_for(steps, parts, self.weights)
