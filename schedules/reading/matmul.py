"""Analysis of a function's stages as matmuls."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim

from lowering.tensorir.expressions import Expr, loads, substitute, uses

from ..half_precision import HALF
from .quantized_weights import WeightQuantization, read_quantization
from .stages import Axis, Stage, has_same_axes
from .winograd import TransformedWeights, read_transformed_weights

MATMULS = "lowering.matmuls"
"""Attribute of a function whose float32 matmuls are computed in another precision: "tf32" or "3xtf32", if the target
supports it (schedules/cuda/matmul/tensor_types.py).
"""

WEIGHTS = "lowering.weights"
"""Attribute of a function: the indices of its parameters that are weights of the model, which no kernel writes."""

_ACCUMULATOR_TYPES = ("float32", "float64", "int32", *HALF)
_TYPES = {"float64": ("float64",), "float32": ("float32", *HALF), "int32": ("uint8", "int8")}
"""Types of operands, by the type of the accumulators."""


@dataclass(frozen=True)
class Matmul:
    """C[batch, rows, j] = sum over k of A[batch, rows, k] * B[batch, k, j].

    A and B are loads at those axes; `rows` are the axes that B does not depend on, flattened to M rows. If B is
    quantized, `quantization` has its loads, and b loads the integers. If a table selects the matrix of B by which a row
    is multiplied, `selector` loads it at that row, which is the only batch axis. If B is computed from transformed
    weights of a convolution, `transformed` has their load, and so has b.
    """

    stage: Stage
    a: ir.TensorLoad
    b: ir.TensorLoad
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    j: Axis
    k: Axis
    quantization: WeightQuantization | None = None
    selector: ir.TensorLoad | None = None
    transformed: TransformedWeights | None = None

    @property
    def acc(self) -> str:
        """The type of the accumulators."""
        return _find_acc_dtype(self.stage)

    def sources(self) -> list[tirx.Buffer]:
        """Return the tensors whose elements are multiplied and scaled."""
        operand_loads = [
            self.a,
            self.b,
            *((self.quantization.scale, self.quantization.zero) if self.quantization is not None else ()),
        ]
        return [load.source for load in operand_loads if load is not None]


@dataclass(frozen=True)
class MatmulGroup:
    """Matmuls with the same axes whose results are read together, and the outputs computed from them."""

    matmuls: tuple[Matmul, ...]
    outputs: tuple[tirx.Buffer, ...]

    @property
    def acc(self) -> str:
        """The type of the accumulators, one for all."""
        return self.matmuls[0].acc


def read_matmul(stage: Stage) -> Matmul | None:
    """Return the stage as a matmul, or None."""
    value = stage.value
    if len(stage.reduce) != 1 or len(stage.axes) < 1 or not isinstance(value, prim.Add):
        return None
    accumulator, term = (value.a, value.b) if isinstance(value.b, prim.Mul) else (value.b, value.a)
    if not isinstance(term, prim.Mul) or not isinstance(accumulator, ir.TensorLoad):
        return None
    if not accumulator.source.same_as(stage.output) or stage.output.dtype not in _ACCUMULATOR_TYPES:
        return None
    k, j, outer = stage.reduce[0], stage.axes[-1], stage.axes[:-1]
    left, right = sorted((term.a, term.b), key=lambda operand: uses(operand, {j.var}))
    selector = _read_selector(right, outer)
    quantization, transformed = read_quantization(right, j, k), read_transformed_weights(right, j, k)
    acc = _find_acc_dtype(stage)
    stored = quantization or transformed
    a, b = _read_operand(left, acc), _read_operand(right, acc, selector) if stored is None else stored.load
    if a is None or b is None or (quantization is not None and acc != "float32"):
        return None
    if uses(a, {j.var}) or not all(uses(b, {axis.var}) for axis in (j, k)) or not uses(a, {k.var}):
        return None
    batch = tuple(axis for axis in outer if uses(b, {axis.var}))
    rows = tuple(axis for axis in outer if not uses(b, {axis.var}))
    if acc == "int32" and (a.ty, b.ty) != ("uint8", "int8"):
        return None
    if selector is not None and (rows or len(batch) != 1):
        return None
    return Matmul(stage, a, b, batch, rows, j, k, quantization, selector, transformed)


def read_groups(stages: list[Stage], parameters: set[tirx.Buffer]) -> list[MatmulGroup] | None:
    """Return the matmuls among the stages, grouped by results that are read together; None for any other stages.

    The stages may be in any order. Matmuls read parameters. A stage that reads their results, or values computed from
    these, does so at its own point. A stage that reads none of them is computed where it is read, such as a bias in
    another type or the activation of a gate; if it is a parameter, it is one more output of a group with its axes.
    """
    matmuls: list[Matmul] = []
    origins: dict[tirx.Buffer, set[int]] = {}  # the matmuls from which the output of a stage is computed
    independent: list[Stage] = []  # parameters that are computed from no matmul
    for stage in stages:
        if stage.reduce:
            matmul = read_matmul(stage)
            if matmul is None or not all(source in parameters for source in matmul.sources()):
                return None
            origins[stage.output] = {len(matmuls)}
            matmuls.append(matmul)
            continue
        result_loads = [node for node in loads(stage.value) if node.source in origins]
        if result_loads and not all(
            all(map(prim.expr_deep_equal, node.indices, stage.indices)) for node in result_loads
        ):
            return None
        if result_loads:
            origins[stage.output] = set().union(*(origins[node.source] for node in result_loads))
            if not all(has_same_axes(stage, matmuls[n].stage) for n in origins[stage.output]):
                return None
        elif stage.output in parameters:
            independent.append(stage)
    groups = _merge_sets(list(origins.values()))
    outputs = [[buffer for buffer in origins if buffer in parameters and origins[buffer] <= group] for group in groups]
    for stage in independent:
        group_index = next(
            (n for n, group in enumerate(groups) if has_same_axes(stage, matmuls[min(group)].stage)), None
        )
        if group_index is None:
            return None
        outputs[group_index].append(stage.output)
    result = [
        MatmulGroup(_align_axes([matmuls[n] for n in sorted(g)]), tuple(origins)) for g, origins in zip(groups, outputs)
    ]
    kinds = {(matmul.acc, None if matmul.selector is None else matmul.selector.source) for matmul in matmuls}
    return (
        result
        if len(kinds) == 1 and all(group.outputs and _have_same_axes(group.matmuls) for group in result)
        else None
    )


def _merge_sets(sets: list[set[int]]) -> list[set[int]]:
    """Merge sets that share a member, and sort them by their lowest members."""
    merged: list[set[int]] = []
    for members in sets:
        overlapping = [group for group in merged if group & members]
        merged = [group for group in merged if not group & members] + [members.union(*overlapping)]
    return sorted(merged, key=min)


def _align_axes(matmuls: list[Matmul]) -> tuple[Matmul, ...]:
    """Return the matmuls over the axes of the first one."""
    first = matmuls[0].stage
    aligned_matmuls = [matmuls[0]]
    for matmul in matmuls[1:]:
        values = {axis.var: of_first.var for axis, of_first in zip(matmul.stage.axes, first.axes)}
        stage = dataclasses.replace(matmul.stage, axes=first.axes, value=substitute(matmul.stage.value, values))
        aligned = read_matmul(stage)
        assert aligned is not None
        aligned_matmuls.append(aligned)
    return tuple(aligned_matmuls)


def _have_same_axes(matmuls: tuple[Matmul, ...]) -> bool:
    """Return whether all have the same batch and rows."""
    return all(matmul.batch == matmuls[0].batch and matmul.rows == matmuls[0].rows for matmul in matmuls)


def _find_acc_dtype(stage: Stage) -> str:
    """Return the type of the accumulators of a stage."""
    dtype = str(stage.output.dtype)
    return dtype if dtype in _TYPES else "float32"


def _read_operand(expr: Expr, acc: str, selector: ir.TensorLoad | None = None) -> ir.TensorLoad | None:
    """Return a load, possibly widened to the accumulator type, whose indices load nothing but the selector."""
    if isinstance(expr, prim.Cast) and expr.ty == acc:
        expr = expr.value
    if not isinstance(expr, ir.TensorLoad) or str(expr.ty) not in _TYPES[acc]:
        return None
    inner = loads(expr)[1:]
    return expr if all(selector is not None and prim.expr_deep_equal(load, selector) for load in inner) else None


def _read_selector(expr: Expr, axes: tuple[Axis, ...]) -> ir.TensorLoad | None:
    """Return the load of an integer of a table, at the last of the axes, that is in the indices of the other loads."""
    inner = [load for node in loads(expr) for index in node.indices for load in loads(index)]
    if not inner or not axes:
        return None
    first = inner[0]
    is_same = all(prim.expr_deep_equal(load, first) for load in inner)
    is_table = len(first.indices) == 1 and first.indices[0].same_as(axes[-1].var) and str(first.ty) == "int64"
    return first if is_same and is_table else None
