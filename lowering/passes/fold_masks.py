"""Turns masks that are computed in the model into formulas, so that no mask of S x T elements is ever built.

A mask with a leaf that needs both i and j, such as one that is an input of the model, stays as it is.
"""

from __future__ import annotations

import dataclasses

import tvm
from tvm import ir, relax, tirx
from tvm.ir import Expr

from ..attention.formula import Formula
from ..attention.problem import Mask
from ..tensorir.expressions import is_int, walk
from .elements import NoExpression
from .folding import Attention, Bindings, OperandFolder, replaced, without_half


def fold_masks(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with a formula in place of the mask wherever the mask can be written as one."""

    def instead(
        builder: relax.BlockBuilder, bindings: Bindings, attention: Attention
    ) -> tuple[list[relax.Binding], relax.Call] | None:
        record = attention.problem.mask
        return _folded(mod, builder, bindings, attention, record) if isinstance(record, Mask) else None

    return replaced(mod, instead)


def _folded(
    mod: tvm.IRModule, builder: relax.BlockBuilder, bindings: Bindings, attention: Attention, record: Mask
) -> tuple[list[relax.Binding], relax.Call] | None:
    """The attention with a formula, behind what that needs; None where the mask is none."""
    mask, total = attention.arguments["mask"], attention.sizes[-1]
    folding = OperandFolder(mod, builder, bindings, attention, mask.ty.shape.values[3] if record.pad else total)
    try:
        value = folding.tabulated(without_half(folding.elements.at(mask, _place(mask, record, folding.indices))))
    except NoExpression:
        return None
    if any(folding.over_both(node) for node in walk(value) if isinstance(node, ir.TensorLoad)):
        return None
    tables: dict[relax.Expr, tirx.Buffer] = {}
    value = folding.flattened(value, tables)
    if any(is_int(size, 0) for buffer in tables.values() for size in buffer.shape):
        return None
    short = record.pad and not folding.elements.analyzer.can_prove_equal(folding.keys, total)
    sizes = folding.sizes_in(value, tables)
    try:
        formula, read = Formula.of(value, folding.indices, sizes, list(tables.values()), short)
    except ValueError:
        return None
    problem = dataclasses.replace(attention.problem, mask=formula)
    given = {**attention.arguments, "mask_keys": folding.keys, **folding.arguments(read, tables)}
    given["q"] = folding.with_conditions(given["q"])
    return folding.tables, attention.solving(builder, problem, given)


def _place(mask: relax.Expr, record: Mask, indices: list[Expr]) -> list[Expr]:
    """Where the mask's element for (b, h, i, j) lies, which it is broadcast to."""
    point: list[Expr] = []
    shape = mask.ty.shape.values
    for axis, (index, size) in enumerate(zip(indices, record.dims)):
        broadcast = size == 1 and not (axis == 3 and record.pad)
        at = tirx.min(index, shape[axis] - 1) if axis in record.broadcasts else index
        point.append(tirx.const(0, "int64") if broadcast else at)
    return point
