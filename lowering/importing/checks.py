"""Checks of data and sizes while a model runs: Relax calls of the functions in runtime/checks.c and requests_*.c.

Each gives its first argument back, and is a pure function for the compiler: what needs the check reads its result, so
that it happens before, and a check whose result nobody needs is dead code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, relax, tirx

INDICES = "lowering_check_indices"
SIZES = "lowering_check_sizes"
CONDITION = "lowering_check"
OPENPPL = "lowering_check_openppl"
TENSORRT_LLM = "lowering_check_tensorrt_llm"
SERVED, SOURCES = "lowering_check_served", "lowering_check_sources"
REQUESTS = (OPENPPL, TENSORRT_LLM, SERVED, SOURCES)
MATCH_SHAPE = "lowering_match_shape"


def check_indices(
    tensor: relax.Expr, bounds: Sequence[Any], from_the_back: bool, name: str, bounded: Sequence[str]
) -> relax.Call:
    """The integers, each of which is less than its bound, and at least 0 or, if from_the_back, minus the bound.

    Of several bounds each belongs to one index along the last axis. name says in errors what holds the integers,
    bounded what the bounds are sizes of.
    """
    arguments = [tensor, _shape(bounds), tirx.const(int(from_the_back), "int64"), name, "\n".join(bounded)]
    return _call(INDICES, arguments, tensor.ty)


def check_sizes(sizes: relax.Expr, others: Sequence[Any], itemsize: int, name: str) -> relax.Call:
    """The shape, sizes that come from data: not negative, and dimensions, with the others, of a tensor that fits in
    memory. itemsize 0: they are no dimensions of one tensor. name says in errors whose sizes they are."""
    return _call(SIZES, [sizes, _shape(others), tirx.const(itemsize, "int64"), name], sizes.ty)


def check_condition(tensor: relax.Expr, condition: Any, text: str, numbers: Sequence[Any]) -> relax.Call:
    """The tensor, if the condition on sizes holds; else the error `text`, with the numbers in place of each {}."""
    one, zero = tirx.const(1, "int64"), tirx.const(0, "int64")
    return _call(CONDITION, [tensor, _shape([tirx.Select(condition, one, zero), *numbers]), text], tensor.ty)


def check_requests(name: str, tables: Sequence[relax.Expr | None], sizes: Sequence[Any], node: str) -> relax.Call:
    """The first of the tables of requests, which fit each other and the sizes, as the function of that name knows them
    (one of REQUESTS). node is named in errors."""
    first, *others = (tirx.const(0, "int64") if table is None else table for table in tables)
    return _call(name, [first, _shape(sizes), node, *others], first.ty)


def checked(value: relax.Expr) -> relax.Expr | None:
    """What a call of one of these functions checks and gives back; None for anything else."""
    name = called(value)
    return value.args[1] if name in (INDICES, SIZES, CONDITION, *REQUESTS) else None


def checked_instead(value: relax.Call, tensor: relax.Expr) -> relax.Call:
    """The same check of sizes, which gives this tensor back."""
    name, _, *rest = value.args
    return _call(str(name.global_symbol), [tensor, *rest], tensor.ty)


def called(value: relax.Expr) -> str | None:
    """The name of the function of the runtime that a call calls."""
    if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_pure_packed"):
        return None
    return str(value.args[0].global_symbol)


def _call(name: str, arguments: Sequence[Any], kind: Any) -> relax.Call:
    return relax.op.call_pure_packed(name, *arguments, ty_args=kind)


def _shape(sizes: Sequence[Any]) -> relax.ShapeExpr:
    return relax.ShapeExpr([tirx.IntImm("int64", s) if isinstance(s, int) else s for s in sizes])
