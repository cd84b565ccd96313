"""Turns scores that a model changes element by element into expressions of the attention's own scores, so that no
tensor of S x T scores is ever built.

What the change hides whatever the scores are becomes the mask of the record, for whose sake kernels skip keys; the rest
its change of scores (attention/split.py). Where a score depends on other scores, by a sum or a maximum along the keys
say, all stay a tensor: the kernel's own differ from those in their last digits, and must not be compared with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.ir import Expr, prim

from ..attention.expr.node import renamed
from ..attention.expr.read import read
from ..attention.formula import CHANGE, Formula
from ..attention.given_scores import TABLE, change_of
from ..attention.split import split
from ..tensorir.expressions import is_int, rewrite
from .elements import NoExpression
from .folding import Attention, Bindings, OperandFolder, replaced, without_half


def fold_scores(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with an expression in place of changed scores wherever they can be written as one. No mark of
    `given_scores.changed` is left."""

    def instead(
        builder: relax.BlockBuilder, bindings: Bindings, attention: Attention
    ) -> tuple[list[relax.Binding], relax.Call] | None:
        change = change_of(bindings.get(attention.arguments.get(TABLE)))
        if change is None:
            return None
        folded = _folded(mod, builder, bindings, attention, *change)
        return folded or ([], attention.solving(builder, attention.problem, attention.arguments | {TABLE: change[1]}))

    return replaced(mod, instead)


def _folded(
    mod: tvm.IRModule,
    builder: relax.BlockBuilder,
    bindings: Bindings,
    attention: Attention,
    scores: relax.Expr,
    new: relax.Expr,
) -> tuple[list[relax.Binding], relax.Call] | None:
    """The attention with an expression, behind what that needs; None where the new scores are none."""
    while isinstance(bindings.get(scores), relax.Var):
        scores = bindings[scores]
    s = tirx.Var("s", attention.problem.acc_dtype)
    others = {var: value for var, value in bindings.items() if var != scores}  # what the scores are made of is not read
    folding = OperandFolder(mod, builder, others, attention, attention.sizes[-1], s)
    try:
        value = _of_score(folding, folding.elements.at(new, folding.indices), scores, s)
        value = folding.tabulated(without_half(value))
    except NoExpression:
        return None
    if _depend(bindings, [leaf for leaf in folding.elements.leaves if leaf != scores], scores):
        return None
    tables: dict[relax.Expr, tirx.Buffer] = {}
    value = folding.flattened(value, tables)
    if any(is_int(size, 0) for buffer in tables.values() for size in buffer.shape):
        return None
    sizes = folding.sizes_in(value, tables)
    try:
        parts = split(read(value, [*folding.indices, s], sizes, list(tables.values())))
    except ValueError:
        return None
    known = {f"size_{k}": size for k, size in enumerate(sizes)}
    known |= {f"table_{k}": table for k, table in enumerate(tables.values())}
    fields: dict[str, Any] = {"softcap": parts.softcap, "score": None}
    given = dict(attention.arguments)
    for field, part, prefix in (("mask", parts.mask, ""), ("score", parts.change, CHANGE)):
        if part is not None:
            expr, names = renamed(part, prefix)
            fields[field] = Formula(expr)
            given |= folding.arguments({new: known[old] for new, old in names.items()}, tables)
    given["q"] = folding.with_conditions(given["q"])
    problem = dataclasses.replace(attention.problem, **fields)
    return folding.tables, attention.solving(builder, problem, given)


def _of_score(folding: OperandFolder, value: Expr, scores: relax.Expr, s: tirx.Var) -> Expr:
    """value with s in place of the score at (b, h, i, j). Raises NoExpression where it reads another score."""
    buffer = folding.elements.leaves.get(scores)

    def replace(node: Expr) -> Expr | None:
        if not isinstance(node, ir.TensorLoad) or buffer is None or not node.source.same_as(buffer):
            return None
        prove = folding.elements.analyzer.can_prove_equal
        if not all(prove(at, index) for at, index in zip(node.indices, folding.indices)):
            raise NoExpression
        return s if str(node.ty) == str(s.ty) else prim.Cast(node.ty, s)

    return rewrite(value, replace)


def _depend(bindings: Bindings, tensors: Sequence[relax.Expr], scores: relax.Var) -> bool:
    """Whether any of the tensors is computed from the scores."""
    todo, seen = list(tensors), set()
    while todo:
        for var in relax.analysis.free_vars(todo.pop()):
            if var == scores:
                return True
            if var in bindings and var not in seen:
                seen.add(var)
                todo.append(bindings[var])
    return False
