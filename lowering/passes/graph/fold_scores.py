"""Turns element-wise score modifications of a model into expressions, so that no S x T tensor of scores is built.

Keys that the modification hides for all scores become the mask of the record, which lets kernels skip keys. The rest
becomes its score modification (attention/record/score_mod_split.py). If a score depends on other scores, for instance
by a sum or a maximum along the keys, all stay a tensor: the kernel's own scores differ from those in their last digits,
and must not be compared with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.ir import Expr, prim

from ...attention.expr.node import rename_parameters
from ...attention.expr.read import read_expr
from ...attention.record.formula import SCORE_MOD_PREFIX, Formula
from ...attention.record.replaced_scores import SCORE_TABLE, read_replaced_scores
from ...attention.record.score_mod_split import split_score_mod
from ...tensorir.expressions import is_int, rewrite
from .elements import NoExpressionError
from .folding import AttentionCall, Bindings, OperandFolder, replace_attentions, widen_half


def fold_scores(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with score modifications replaced by expressions wherever they can be expressed.

    All marks of `mark_replaced_scores` are removed.
    """

    def fold(
        builder: relax.BlockBuilder, bindings: Bindings, attention: AttentionCall
    ) -> tuple[list[relax.Binding], relax.Call] | None:
        change = read_replaced_scores(bindings.get(attention.arguments.get(SCORE_TABLE)))
        if change is None:
            return None
        folded = _fold_scores(mod, builder, bindings, attention, *change)
        return folded or (
            [],
            attention.call_problem(builder, attention.problem, attention.arguments | {SCORE_TABLE: change[1]}),
        )

    return replace_attentions(mod, fold)


def _fold_scores(
    mod: tvm.IRModule,
    builder: relax.BlockBuilder,
    bindings: Bindings,
    attention: AttentionCall,
    scores: relax.Expr,
    new: relax.Expr,
) -> tuple[list[relax.Binding], relax.Call] | None:
    """Return the attention with an expression, and the bindings it needs; None if the scores cannot be expressed."""
    while isinstance(bindings.get(scores), relax.Var):
        scores = bindings[scores]
    s = tirx.Var("s", attention.problem.acc_dtype)
    other_bindings = {var: value for var, value in bindings.items() if var != scores}  # the scores are a leaf
    folding = OperandFolder(mod, builder, other_bindings, attention, attention.sizes[-1], s)
    try:
        value = _substitute_score(folding, folding.elements.read_element(new, folding.indices), scores, s)
        value = folding.tabulate(widen_half(value))
    except NoExpressionError:
        return None
    if _depends_on_scores(bindings, [leaf for leaf in folding.elements.leaves if leaf != scores], scores):
        return None
    tables: dict[relax.Expr, tirx.Buffer] = {}
    value = folding.flatten_loads(value, tables)
    if any(is_int(size, 0) for buffer in tables.values() for size in buffer.shape):
        return None
    sizes = folding.find_sizes(value, tables)
    try:
        score_split = split_score_mod(read_expr(value, [*folding.indices, s], sizes, list(tables.values())))
    except ValueError:
        return None
    operands = {f"size_{k}": size for k, size in enumerate(sizes)}
    operands |= {f"table_{k}": table for k, table in enumerate(tables.values())}
    fields: dict[str, Any] = {"softcap": score_split.softcap, "score": None}
    arguments = dict(attention.arguments)
    for field, expression, prefix in (
        ("mask", score_split.mask, ""),
        ("score", score_split.score_mod, SCORE_MOD_PREFIX),
    ):
        if expression is not None:
            expr, names = rename_parameters(expression, prefix)
            fields[field] = Formula(expr)
            arguments |= folding.arguments({new: operands[old] for new, old in names.items()}, tables)
    arguments["q"] = folding.add_conditions(arguments["q"])
    problem = dataclasses.replace(attention.problem, **fields)
    return folding.tables, attention.call_problem(builder, problem, arguments)


def _substitute_score(folding: OperandFolder, value: Expr, scores: relax.Expr, s: tirx.Var) -> Expr:
    """Return value with s for the score at (b, h, i, j). Raise NoExpressionError if it reads another score."""
    buffer = folding.elements.leaves.get(scores)

    def replace(node: Expr) -> Expr | None:
        if not isinstance(node, ir.TensorLoad) or buffer is None or not node.source.same_as(buffer):
            return None
        prove = folding.elements.analyzer.can_prove_equal
        if not all(prove(at, index) for at, index in zip(node.indices, folding.indices)):
            raise NoExpressionError
        return s if str(node.ty) == str(s.ty) else prim.Cast(node.ty, s)

    return rewrite(value, replace)


def _depends_on_scores(bindings: Bindings, tensors: Sequence[relax.Expr], scores: relax.Var) -> bool:
    """Return whether any of the tensors is computed from the scores."""
    todo, seen = list(tensors), set()
    while todo:
        for var in relax.analysis.free_vars(todo.pop()):
            if var == scores:
                return True
            if var in bindings and var not in seen:
                seen.add(var)
                todo.append(bindings[var])
    return False
