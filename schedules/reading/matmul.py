"""Reading matmuls from a function's stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tvm import ir, tirx
from tvm.ir import prim

from lowering.tensorir.expressions import Expr, loads, substitute, uses

from ..half_precision import HALF
from .quantized_weights import WeightQuantization, read_quantization
from .stages import Axis, Stage, has_same_axes

MATMULS = "lowering.matmuls"
"""Attribute of a function whose matmuls of float32 are computed otherwise than in float32: "tf32" or "3xtf32", where
the target can (schedules/cuda/tensor_types.py)."""

WEIGHTS = "lowering.weights"
"""Of a function: the numbers of its parameters that are weights of the model, which no kernel writes."""

_ACCUMULATOR_TYPES = ("float32", "float64", "int32", *HALF)
_TYPES = {"float64": ("float64",), "float32": ("float32", *HALF), "int32": ("uint8", "int8")}
"""Of operands, by the type of the sums."""


@dataclass(frozen=True)
class Matmul:
    """C[batch, rows, j] = sum over k of A[batch, rows, k] * B[batch, k, j].

    A and B are loads at those axes; `rows` are the axes that B does not depend on, taken together as M rows. Where the
    elements of B are `codes`, b loads the integers. Where a table says which matrix of B a row is multiplied by,
    `selector` loads it at that row, which is the only batch axis.
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

    @property
    def acc(self) -> str:
        """The type of the sums."""
        return _acc(self.stage)

    def sources(self) -> list[tirx.Buffer]:
        """The tensors whose elements are multiplied and scaled."""
        parts = [
            self.a,
            self.b,
            *((self.quantization.scale, self.quantization.zero) if self.quantization is not None else ()),
        ]
        return [load.source for load in parts if load is not None]


@dataclass(frozen=True)
class MatmulGroup:
    """Matmuls with the same axes whose sums are read together, and the outputs that are made of them."""

    matmuls: tuple[Matmul, ...]
    outputs: tuple[tirx.Buffer, ...]

    @property
    def acc(self) -> str:
        """The type of the sums, one for all."""
        return self.matmuls[0].acc


def read_matmul(stage: Stage) -> Matmul | None:
    """The stage as a matmul, or None."""
    value = stage.value
    if len(stage.reduce) != 1 or len(stage.axes) < 1 or not isinstance(value, prim.Add):
        return None
    total, term = (value.a, value.b) if isinstance(value.b, prim.Mul) else (value.b, value.a)
    if not isinstance(term, prim.Mul) or not isinstance(total, ir.TensorLoad):
        return None
    if not total.source.same_as(stage.output) or stage.output.dtype not in _ACCUMULATOR_TYPES:
        return None
    k, j, outer = stage.reduce[0], stage.axes[-1], stage.axes[:-1]
    left, right = sorted((term.a, term.b), key=lambda operand: uses(operand, {j.var}))
    selector = _selector(right, outer)
    codes = read_quantization(right, j, k)
    acc = _acc(stage)
    a, b = _operand(left, acc), codes.load if codes is not None else _operand(right, acc, selector)
    if a is None or b is None or (codes is not None and acc != "float32"):
        return None
    if uses(a, {j.var}) or not all(uses(b, {axis.var}) for axis in (j, k)) or not uses(a, {k.var}):
        return None
    batch = tuple(axis for axis in outer if uses(b, {axis.var}))
    rows = tuple(axis for axis in outer if not uses(b, {axis.var}))
    if acc == "int32" and (a.ty, b.ty) != ("uint8", "int8"):
        return None
    if selector is not None and (rows or len(batch) != 1):
        return None
    return Matmul(stage, a, b, batch, rows, j, k, codes, selector)


def read_groups(stages: list[Stage], parameters: set[tirx.Buffer]) -> list[MatmulGroup] | None:
    """The matmuls among the stages, those whose sums meet in one group; None where the stages are anything else.

    In whatever order they stand: matmuls are of parameters, and what reads their sums, or what was made of them, does
    so at its own point. A stage that reads nothing of them is computed where it is read, such as a bias in another type
    or the activation of a gate; as a parameter it is one more output of a group with its axes.
    """
    matmuls: list[Matmul] = []
    made: dict[tirx.Buffer, set[int]] = {}  # of which matmuls what a stage writes is made
    alone: list[Stage] = []  # parameters that are made of none
    for stage in stages:
        if stage.reduce:
            matmul = read_matmul(stage)
            if matmul is None or not all(source in parameters for source in matmul.sources()):
                return None
            made[stage.output] = {len(matmuls)}
            matmuls.append(matmul)
            continue
        own = [node for node in loads(stage.value) if node.source in made]
        if own and not all(all(map(prim.expr_deep_equal, node.indices, stage.indices)) for node in own):
            return None
        if own:
            made[stage.output] = set().union(*(made[node.source] for node in own))
            if not all(has_same_axes(stage, matmuls[n].stage) for n in made[stage.output]):
                return None
        elif stage.output in parameters:
            alone.append(stage)
    groups = _joined(list(made.values()))
    outputs = [[buffer for buffer in made if buffer in parameters and made[buffer] <= group] for group in groups]
    for stage in alone:
        place = next((n for n, group in enumerate(groups) if has_same_axes(stage, matmuls[min(group)].stage)), None)
        if place is None:
            return None
        outputs[place].append(stage.output)
    found = [MatmulGroup(_aligned([matmuls[n] for n in sorted(g)]), tuple(made)) for g, made in zip(groups, outputs)]
    kinds = {(p.acc, None if p.selector is None else p.selector.source) for p in matmuls}
    return found if len(kinds) == 1 and all(group.outputs and _alike(group.matmuls) for group in found) else None


def _joined(sets: list[set[int]]) -> list[set[int]]:
    """Sets that share a member as one, in the order of their lowest members."""
    found: list[set[int]] = []
    for members in sets:
        meeting = [group for group in found if group & members]
        found = [group for group in found if not group & members] + [members.union(*meeting)]
    return sorted(found, key=min)


def _aligned(matmuls: list[Matmul]) -> tuple[Matmul, ...]:
    """The matmuls over the axes of the first one."""
    first = matmuls[0].stage
    found = [matmuls[0]]
    for matmul in matmuls[1:]:
        values = {axis.var: of_first.var for axis, of_first in zip(matmul.stage.axes, first.axes)}
        stage = dataclasses.replace(matmul.stage, axes=first.axes, value=substitute(matmul.stage.value, values))
        aligned = read_matmul(stage)
        assert aligned is not None
        found.append(aligned)
    return tuple(found)


def _alike(matmuls: tuple[Matmul, ...]) -> bool:
    """Whether all have the same batch and rows."""
    return all(p.batch == matmuls[0].batch and p.rows == matmuls[0].rows for p in matmuls)


def _acc(stage: Stage) -> str:
    """The type of sums that are stored so."""
    dtype = str(stage.output.dtype)
    return dtype if dtype in _TYPES else "float32"


def _operand(expr: Expr, acc: str, selector: ir.TensorLoad | None = None) -> ir.TensorLoad | None:
    """A load, possibly widened to the type of the sums, in whose indices nothing is loaded but the selector."""
    if isinstance(expr, prim.Cast) and expr.ty == acc:
        expr = expr.value
    if not isinstance(expr, ir.TensorLoad) or str(expr.ty) not in _TYPES[acc]:
        return None
    inner = loads(expr)[1:]
    return expr if all(selector is not None and prim.expr_deep_equal(load, selector) for load in inner) else None


def _selector(expr: Expr, axes: tuple[Axis, ...]) -> ir.TensorLoad | None:
    """The load of an integer of a table, at the last of the axes, that is in the indices of the others."""
    inner = [load for node in loads(expr) for index in node.indices for load in loads(index)]
    if not inner or not axes:
        return None
    first = inner[0]
    same = all(prim.expr_deep_equal(load, first) for load in inner)
    is_table = len(first.indices) == 1 and first.indices[0].same_as(axes[-1].var) and str(first.ty) == "int64"
    return first if same and is_table else None
