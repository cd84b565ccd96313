"""Scores that a model computes from those of an attention, as a tensor, which the attention reads in place of its own.

`mark_replaced_scores` marks the tensor until passes/graph/fold_scores.py has read it. The mark names the tensor of the
attention's original scores, so that elements of the new ones can be written as expressions of them.
"""

from __future__ import annotations

from tvm import ir, relax

from ..expr.node import PAIR, Expr
from .formula import SCORE_MOD_PREFIX, Formula

SCORE_TABLE = f"{SCORE_MOD_PREFIX}table_0"
"""The parameter of the attention for the new scores, [B, Hq, S, T]."""

_NAME = "lowering_changed_scores"


def read_scores(dtype: str) -> Formula:
    """Return the score modification that reads the new scores from a table of dtype."""
    return Formula(Expr("load", dtype, tuple(Expr("index", "int64", value=name) for name in PAIR), SCORE_TABLE))


def mark_replaced_scores(scores: relax.Expr, new: relax.Expr) -> relax.Call:
    """Mark the tensor `new`, computed from `scores`, those of the attention that reads it.

    No such call is left when the model runs.
    """
    return relax.op.call_pure_packed(_NAME, scores, new, ty_args=new.ty)


def read_replaced_scores(value: relax.Expr | None) -> tuple[relax.Var, relax.Expr] | None:
    """Return the scores, and the new ones, of a call of `mark_replaced_scores`; None for anything else."""
    if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_pure_packed"):
        return None
    name, *tensors = value.args
    return (tensors[0], tensors[1]) if str(name.global_symbol) == _NAME else None
