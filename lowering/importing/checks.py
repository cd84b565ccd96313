"""Run-time checks of data and sizes: Relax calls of the functions in runtime/native/checks.c and requests_*.c.

Each function returns its first argument, and is pure for the compiler. An operation that needs the check reads its
result, so the check is executed first. A check with an unused result is dead code.
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
TENSOR = "lowering_check_tensor"


def check_indices(
    tensor: relax.Expr, bounds: Sequence[Any], from_the_back: bool, name: str, bounded: Sequence[str]
) -> relax.Call:
    """Check that each integer is less than its bound, and at least 0 or, if from_the_back, minus the bound.

    If there are several bounds, each applies to one index along the last axis. In error messages `name` is the tensor
    of the integers, and `bounded` the dimensions that have the bounds as sizes.
    """
    arguments = [tensor, _shape(bounds), tirx.const(int(from_the_back), "int64"), name, "\n".join(bounded)]
    return _call(INDICES, arguments, tensor.ty)


def check_sizes(sizes: relax.Expr, other_dims: Sequence[Any], itemsize: int, name: str) -> relax.Call:
    """Check sizes computed from data: none is negative, and with other_dims they form a tensor that fits in memory.

    With itemsize 0 they are not dimensions of one tensor. `name` is the owner of the sizes in error messages.
    """
    return _call(SIZES, [sizes, _shape(other_dims), tirx.const(itemsize, "int64"), name], sizes.ty)


def check_condition(tensor: relax.Expr, condition: Any, code: str, text: str, numbers: Sequence[Any]) -> relax.Call:
    """Return the tensor if the condition on sizes holds; else raise an error.

    Args:
        tensor: The tensor to return.
        condition: A condition on sizes.
        code: The stable code of the error.
        text: The error's text; each {} is replaced by the next of the numbers.
        numbers: Sizes.
    """
    true, false = tirx.const(1, "int64"), tirx.const(0, "int64")
    return _call(CONDITION, [tensor, _shape([tirx.Select(condition, true, false), *numbers]), code, text], tensor.ty)


def check_requests(name: str, tables: Sequence[relax.Expr | None], sizes: Sequence[Any], node: str) -> relax.Call:
    """Return the first table of a batch of requests, checked against the other tables and the sizes.

    `name`, one of REQUESTS, is the function that checks. `node` is the node in error messages.
    """
    first, *rest = (tirx.const(0, "int64") if table is None else table for table in tables)
    return _call(name, [first, _shape(sizes), node, *rest], first.ty)


def read_checked_tensor(value: relax.Expr) -> relax.Expr | None:
    """Return the tensor that a check takes and returns; None for other expressions."""
    name = read_callee_name(value)
    return value.args[1] if name in (INDICES, SIZES, CONDITION, *REQUESTS) else None


def replace_checked_tensor(value: relax.Call, tensor: relax.Expr) -> relax.Call:
    """Return the same check, applied to another tensor."""
    name, _, *rest = value.args
    return _call(str(name.global_symbol), [tensor, *rest], tensor.ty)


def read_callee_name(value: relax.Expr) -> str | None:
    """Return the name of the runtime function that a call calls; None for other expressions."""
    if not isinstance(value, relax.Call) or value.op != ir.Op.get("relax.call_pure_packed"):
        return None
    return str(value.args[0].global_symbol)


def _call(name: str, arguments: Sequence[Any], kind: Any) -> relax.Call:
    return relax.op.call_pure_packed(name, *arguments, ty_args=kind)


def _shape(sizes: Sequence[Any]) -> relax.ShapeExpr:
    return relax.ShapeExpr([tirx.IntImm("int64", s) if isinstance(s, int) else s for s in sizes])
