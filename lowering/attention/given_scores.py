"""Scores that a model makes of those of an attention, as a tensor, which the attention reads in place of its own.

`changed` marks the tensor until passes/fold_scores.py has read it: it says which tensor holds the attention's scores
as they were, so that elements of the changed ones can be written as expressions of them.
"""

from __future__ import annotations

from tvm import ir, relax

from .expr.node import PAIR, Expr
from .formula import CHANGE, Formula

TABLE = f"{CHANGE}table_0"
"""The parameter of the attention that holds the new scores, [B, Hq, S, T]."""

_NAME = "lowering_changed_scores"


def read_scores(dtype: str) -> Formula:
    """The change of scores that takes the new ones from a table of dtype."""
    return Formula(Expr("load", dtype, tuple(Expr("index", "int64", value=name) for name in PAIR), TABLE))


def changed(scores: relax.Expr, new: relax.Expr) -> relax.Call:
    """The tensor `new`, which was computed from `scores`, those of the attention that reads it. No such call is left
    when the model runs."""
    return relax.op.call_pure_packed(_NAME, scores, new, ty_args=new.ty)


def change_of(value: relax.Expr | None) -> tuple[relax.Var, relax.Expr] | None:
    """The scores, and the new ones, of a call of `changed`; None for anything else."""
    if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_pure_packed"):
        return None
    name, *tensors = value.args
    return (tensors[0], tensors[1]) if str(name.global_symbol) == _NAME else None
