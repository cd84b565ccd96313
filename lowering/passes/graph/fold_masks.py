"""Turns masks that are computed in the model into formulas, so that no mask of S x T elements is built.

A mask with a leaf that needs both i and j, such as a mask that is an input of the model, is unchanged.
"""

from __future__ import annotations

import dataclasses

import tvm
from tvm import ir, relax, tirx
from tvm.ir import Expr

from ...attention.record.formula import Formula
from ...attention.record.problem import Mask
from ...tensorir.expressions import is_int, walk
from .elements import NoExpressionError
from .folding import AttentionCall, Bindings, OperandFolder, replace_attentions, widen_half


def fold_masks(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with masks replaced by formulas wherever they can be expressed."""

    def fold(
        builder: relax.BlockBuilder, bindings: Bindings, attention: AttentionCall
    ) -> tuple[list[relax.Binding], relax.Call] | None:
        record = attention.problem.mask
        return _fold_mask(mod, builder, bindings, attention, record) if isinstance(record, Mask) else None

    return replace_attentions(mod, fold)


def _fold_mask(
    mod: tvm.IRModule, builder: relax.BlockBuilder, bindings: Bindings, attention: AttentionCall, record: Mask
) -> tuple[list[relax.Binding], relax.Call] | None:
    """Return the attention with a formula, and the bindings it needs; None if the mask cannot be expressed."""
    mask, total = attention.arguments["mask"], attention.sizes[-1]
    folding = OperandFolder(mod, builder, bindings, attention, mask.ty.shape.values[3] if record.pad else total)
    try:
        value = folding.tabulate(
            widen_half(folding.elements.read_element(mask, _locate_element(mask, record, folding.indices)))
        )
    except NoExpressionError:
        return None
    if any(folding.needs_both(node) for node in walk(value) if isinstance(node, ir.TensorLoad)):
        return None
    tables: dict[relax.Expr, tirx.Buffer] = {}
    value = folding.flatten_loads(value, tables)
    if any(is_int(size, 0) for buffer in tables.values() for size in buffer.shape):
        return None
    short = record.pad and not folding.elements.analyzer.can_prove_equal(folding.keys, total)
    sizes = folding.find_sizes(value, tables)
    try:
        formula, read = Formula.from_tir(value, folding.indices, sizes, list(tables.values()), short)
    except ValueError:
        return None
    problem = dataclasses.replace(attention.problem, mask=formula)
    arguments = {**attention.arguments, "mask_keys": folding.keys, **folding.arguments(read, tables)}
    arguments["q"] = folding.add_conditions(arguments["q"])
    return folding.tables, attention.call_problem(builder, problem, arguments)


def _locate_element(mask: relax.Expr, record: Mask, indices: list[Expr]) -> list[Expr]:
    """Return the indices of the mask's element for (b, h, i, j) after broadcasting."""
    point: list[Expr] = []
    shape = mask.ty.shape.values
    for axis, (index, size) in enumerate(zip(indices, record.dims)):
        broadcast = size == 1 and not (axis == 3 and record.pad)
        at = tirx.min(index, shape[axis] - 1) if axis in record.broadcasts else index
        point.append(tirx.const(0, "int64") if broadcast else at)
    return point
