"""Packs weights for matrix kernels, once, at compile time.

A matmul x W with a constant matrix W becomes a matmul with W stored in panels (panels.py), which the target chooses
(weight_layouts.py). Transposes and casts between the weight and the matmul are applied at compile time. A weight with
other readers is preserved, too.

Quantized matrices stay integers and scales (schedules/reading/quantized_weights.py), and float ones are quantized if
the node that multiplies by them has a scheme.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import QUAD, read_cpu_features

from ...choices import INT8_ROWS, Scheme
from ...errors import ArtifactError
from ...importing.quantized_matrix import QuantizedMatrix
from ..compile_state import CompileState
from .compression import Preparation
from .constants import FLOATS, WeightTracer, make_parameters, replace_main_body
from .convolutions import (
    OUT_ELEMENTWISE_FUSABLE,
    Convolution,
    ConvolutionGroups,
    make_grouped_convolution,
    make_implicit_matmul,
    read_convolution,
)
from .grouped_weights import GroupedCall, read_grouped_call
from .panels import ElementReader, pack, pack_matrix, packed_matmul, read_group_element
from .weight_layouts import ColumnLayout, PanelLayout
from .winograd import is_transformed, read_transformed_element, transform_weights

_LANE_STEPS: dict[int, tuple[str, ...]] = {1: (), 2: ("pairs",), QUAD: ("quads",)}
"""What the name of a weight states about rows that are stored together."""


def pack_weights(state: CompileState) -> CompileState:
    """Let `main` multiply by packed weights; the state then has them in the order of its parameters.

    Only matrices of float32, float16 and bfloat16 on the right of a matmul are packed; accumulators are float32. Unused
    weights are dropped. Quantized weights with other readers become floats. With a scheme, float matrices are
    compressed: int8 with a scale for each column, int4 with a scale for each column and 32 rows, or f16.
    """
    target, weights = state.target.tvm, dict(state.weights)
    layout: PanelLayout | ColumnLayout
    if target.kind.name == "llvm":
        layout = PanelLayout(read_cpu_features(target))
    else:
        layout = ColumnLayout(state.tensor_core_dtypes)
    preparation = Preparation(state.options.accuracy_level, state.schemes.values())
    packer = _WeightPacker(state, weights, layout, preparation)
    main = state.module["main"]
    body = packer.rewrite(main.body)
    new_weights = [parameter for weight in packer.packed.values() if weight for parameter in weight.parameters]
    mod, packed = replace_main_body(packer.builder_.get(), main, body, new_weights, weights)
    notes = (*state.notes, *preparation.list_costs())
    if packer.int8_rows:
        notes = (
            *notes,
            f"the rows of matmuls by {packer.int8_rows} quantized matrices are int8 (accuracy level {INT8_ROWS})",
        )
    accuracy_level = INT8_ROWS if packer.int8_rows else 0
    return replace(state, module=mod, weights=packed, notes=notes, accuracy_level=accuracy_level)


@dataclass(frozen=True)
class _PackedWeight:
    """New parameters with their arrays, and the function that reads an element of them."""

    parameters: list[tuple[relax.Var, np.ndarray]]
    element: ElementReader


@mutator
class _WeightPacker(PyExprMutator):
    """Rewrites matmuls; `packed` has each weight by its name and transformations, None for one that is not packed.

    int8_rows counts the matrices whose rows are quantized, too.
    """

    def __init__(
        self,
        state: CompileState,
        weights: dict[str, np.ndarray | QuantizedMatrix],
        layout: PanelLayout | ColumnLayout,
        preparation: Preparation,
    ) -> None:
        super().__init__(state.module)
        self.mod, self.weights, self.layout, self.preparation = state.module, weights, layout, preparation
        self.schemes = state.schemes
        self.scheme: Scheme | None = None  # of the binding that is visited
        self.error: ArtifactError | None = None  # of a visitor
        self.packed: dict[tuple[str, ...], _PackedWeight | None] = {}
        self.int8_rows = 0
        self.constants = WeightTracer(weights, set(self.mod["main"].params), self.lookup_binding)

    def rewrite(self, body: relax.Expr) -> relax.Expr:
        """Return the body with packed weights.

        Raises:
            ArtifactError: The file system is full.
        """
        try:
            return self.visit_expr(body)
        except RuntimeError:  # as which errors of a visitor return from TVM
            if self.error is None:
                raise
            raise self.error from self.error.__cause__

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        self.scheme = self.schemes.get(binding.var.name)
        super().visit_var_binding_(binding)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        try:
            return self.pack_call(call)
        except ArtifactError as error:
            self.error = error
            raise

    def pack_call(self, call: relax.Call) -> relax.Expr:
        """Return a call by packed weights, or the call itself if it multiplies by none."""
        convolution = read_convolution(call) if self.layout.packs_convolutions else None
        if convolution is not None:
            return self.pack_convolution(call, convolution)
        grouped = read_grouped_call(self.mod, call)
        if grouped is not None:
            return self.pack_grouped_matmul(call, grouped)
        return self.pack_matmul(call) if call.op == tvm.ir.Op.get("relax.matmul") else call

    def pack_matmul(self, call: relax.Call) -> relax.Expr:
        x, (steps, matrix) = call.args[0], self.constants.trace(call.args[1])
        x_dtype, dtype = str(x.ty.dtype), str(call.ty.dtype)
        if matrix is None or matrix.ndim != 2 or matrix.shape[1] < self.layout.min_columns or x.ty.ndim < 1:
            return call
        is_int8 = (x_dtype, matrix.dtype.name, dtype) == ("uint8", "int8", "int32") and isinstance(matrix, np.ndarray)
        if not (self.layout.packs_int8 if is_int8 else {x_dtype, matrix.dtype.name, dtype} <= set(FLOATS)):
            return call
        columns, lanes = matrix.shape[1], self.layout.choose_lanes(matrix, x_dtype)
        scheme = None if is_int8 else self.scheme
        key = self.make_key(steps, scheme, lanes)
        if key not in self.packed:
            prepared = matrix if is_int8 else self.preparation.prepare(matrix, scheme)
            is_packed = self.layout.is_packed(prepared, x_dtype, steps, scheme)
            stored_lanes = self.layout.choose_lanes(prepared, x_dtype)
            width = self.layout.choose_width(columns, stored_lanes)
            self.packed[key] = self.pack(key, prepared, width, stored_lanes) if is_packed else None
        if self.packed[key] is None:
            return call
        return self.emit(
            key, self.layout.function_name, lambda x, element: packed_matmul(x, element, columns, dtype), x
        )

    def pack_grouped_matmul(self, call: relax.Call, grouped: GroupedCall) -> relax.Expr:
        """Return rows times packed matrices, where each row selects one of several."""
        steps, matrices = self.constants.trace(grouped.matrices)
        if matrices is None:
            return call
        x_dtype = str(grouped.rows.ty.dtype)
        lanes = self.layout.choose_lanes(matrices, x_dtype)
        key, nr = self.make_key((*steps, "grouped"), self.scheme, lanes), self.layout.choose_width(grouped.columns)
        if key not in self.packed:
            prepared = grouped.pad(self.preparation.prepare(matrices, self.scheme), nr)
            self.packed[key] = self.pack(key, prepared, nr, self.layout.choose_lanes(prepared, x_dtype))
        compute = functools.partial(grouped.compute, nr=nr)
        return self.emit(key, "grouped_matmul", compute, grouped.rows, grouped.table)

    def pack_convolution(self, call: relax.Call, convolution: Convolution) -> relax.Expr:
        """Return a convolution by packed weights if they are constant; their element type is unchanged."""
        x, (steps, weights) = call.args[0], self.constants.trace(call.args[1])
        x_dtype, shape = str(x.ty.dtype), call.ty.shape
        if not isinstance(weights, np.ndarray) or not {x_dtype, str(call.ty.dtype), weights.dtype.name} <= set(FLOATS):
            return call
        if convolution.groups > 1:
            return self.pack_grouped_convolution(call, convolution, steps, weights)
        matrix = weights.reshape(-1, weights.shape[-1])
        width, compute = self.layout.choose_width(matrix.shape[1]), functools.partial(make_implicit_matmul, convolution)
        if is_transformed(convolution, weights, list(shape.values)):
            key = (*steps, "winograd")
            if key not in self.packed:
                u = {"packed": transform_weights(weights, width)}
                self.packed[key] = self.make_weight(key, u, read_transformed_element)
            return self.emit(key, "winograd_convolution", compute, x, shape)
        lanes = self.layout.choose_lanes(matrix, x_dtype)
        key = self.make_key((*steps, "patches"), None, lanes)
        if key not in self.packed:
            self.packed[key] = self.make_weight(key, *pack_matrix(matrix, width, lanes))
        return self.emit(key, "packed_convolution", compute, x, shape)

    def pack_grouped_convolution(
        self, call: relax.Call, convolution: Convolution, steps: tuple[str, ...], weights: np.ndarray
    ) -> relax.Expr:
        assert isinstance(self.layout, PanelLayout)
        groups = ConvolutionGroups.choose(
            convolution.groups, weights.shape[-1] // convolution.groups, self.layout.cpu.lanes("float32")
        )
        key = (*steps, "groups")
        if key not in self.packed:
            matrices = groups.make_matrices(weights)
            width = self.layout.choose_width(matrices[0].shape[1])
            panels = np.stack([pack(matrix, width) for matrix in matrices])
            self.packed[key] = self.make_weight(key, {"packed": panels}, read_group_element)
        compute = functools.partial(make_grouped_convolution, convolution, groups)
        matmuls = self.emit(key, "packed_convolution", compute, call.args[0], call.ty.shape)
        return relax.op.reshape(self.builder_.emit(matmuls), call.ty.shape)

    def make_key(self, steps: tuple[str, ...], scheme: Scheme | None, lanes: int) -> tuple[str, ...]:
        """Return the name of a weight: how it is made of one of the model, by its parts."""
        return (*steps, *filter(None, [scheme]), *_LANE_STEPS[lanes])

    def pack(
        self, steps: tuple[str, ...], matrix: np.ndarray | QuantizedMatrix, width: int, lanes: int
    ) -> _PackedWeight:
        """Return the weight that `steps` names: a matrix in panels of `width` columns."""
        if isinstance(matrix, QuantizedMatrix) and lanes == QUAD:
            self.int8_rows += 1
        return self.make_weight(steps, *pack_matrix(matrix, width, lanes))

    def make_weight(
        self, steps: tuple[str, ...], components: Mapping[str, np.ndarray], element: ElementReader
    ) -> _PackedWeight:
        """Return the weight that `steps` names, with its components as new parameters."""
        return _PackedWeight(make_parameters(steps, components, self.weights), element)

    def emit(
        self, steps: tuple[str, ...], name: str, compute: Callable[..., te.Tensor], *args: relax.Expr
    ) -> relax.Expr:
        """Return a call of compute(*args, element), where element(k, j) reads the packed weight."""
        weight = self.packed[steps]
        assert weight is not None

        def compute_packed(*tensors: te.Tensor) -> te.Tensor:
            components = list(tensors[len(args) :])
            return compute(*tensors[: len(args)], functools.partial(weight.element, components))

        return self.builder_.call_te(
            compute_packed,
            *args,
            *(variable for variable, _ in weight.parameters),
            primfunc_name_hint=name,
            primfunc_attrs={"op_pattern": OUT_ELEMENTWISE_FUSABLE},
        )
