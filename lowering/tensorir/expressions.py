"""TensorIR's scalar expressions: traversal and rewriting."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tvm import ir, tirx
from tvm.ir import prim

Expr: TypeAlias = ir.Expr

_CHEAP = ("prim.if_then_else", "tirx.fabs", "tirx.reinterpret")


def is_int(value: Expr, expected: int) -> bool:
    return isinstance(value, prim.IntImm) and value.value == expected


def is_float(value: Expr) -> bool:
    return str(value.ty).startswith(("float", "bfloat"))


def children(expr: Expr) -> list[Expr]:
    """Return the operands of a scalar expression; those of a load are its indices."""
    kind: object = type(expr)
    fields, list_field = _get_operand_fields(kind)
    return list(getattr(expr, list_field)) if list_field else [getattr(expr, field) for field in fields]


@functools.cache
def _get_operand_fields(kind: type) -> tuple[tuple[str, ...], str]:
    """Return the fields of the operands of an expression type, or the one field that lists all of them.

    TVM's types are abstract, and isinstance checks of each expression are slow.
    """
    if issubclass(kind, ir.Call | ir.TensorLoad):
        return (), "args" if issubclass(kind, ir.Call) else "indices"
    fields: dict[tuple[type, ...], tuple[str, ...]] = {
        (prim.BinaryOpExpr, prim.CmpExpr, prim.And, prim.Or): ("a", "b"),
        (prim.Select,): ("condition", "true_value", "false_value"),
        (prim.Cast,): ("value",),
        (prim.Not, prim.BitwiseNot): ("a",),
        (prim.Let,): ("value", "body"),
    }
    return next((names for kinds, names in fields.items() if issubclass(kind, kinds)), ()), ""


def rebuild(expr: Expr, operands: list[Expr]) -> Expr:
    """Return `expr` with other operands of the same types, in the order of `children`."""
    if isinstance(expr, ir.Call):
        return ir.Call(expr.op, operands, expr.attrs, expr.ty_args, ret_ty=expr.ty)
    if isinstance(expr, ir.TensorLoad):
        return tirx.BufferLoad(expr.source, operands)
    if isinstance(expr, prim.Cast):
        return prim.Cast(expr.ty, *operands)
    if isinstance(expr, prim.Let):
        return prim.Let(expr.var, *operands)
    return type(expr)(*operands)


def rewrite(expr: Expr, replace: Callable[[Expr], Expr | None]) -> Expr:
    """Return `expr` with every node for which `replace` returns an expression replaced by it, outermost nodes first.

    It does not recurse, so that the depth is limited by memory only.
    """
    # Results of operands, in order from left to right. A node is visited twice: first its operands are pushed on top
    # of it, and after them it takes their results.
    results: list[Expr] = []
    todo: list[tuple[Expr, list[Expr] | None]] = [(expr, None)]
    while todo:
        node, old = todo.pop()
        if old is None:
            replacement = replace(node)
            old = children(node) if replacement is None else []
            if not old:
                results.append(node if replacement is None else replacement)
                continue
            todo.append((node, old))
            todo += [(operand, None) for operand in reversed(old)]
            continue
        new = results[-len(old) :]
        del results[-len(old) :]
        results.append(node if all(a.same_as(b) for a, b in zip(old, new)) else rebuild(node, new))
    return results[0]


def substitute(expr: Expr, values: Mapping[tirx.Var, Expr]) -> Expr:
    """Return `expr` with variables replaced."""
    return rewrite(expr, lambda e: values.get(e) if isinstance(e, tirx.Var) else None) if values else expr


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield every node of `expr`, each before its operands."""
    todo = [expr]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(children(node))


def is_function(expr: Expr) -> bool:
    """Return whether `expr` calls a function that takes more than an instruction or two."""
    return isinstance(expr, ir.Call) and expr.op.name not in _CHEAP


def loads(expr: Expr) -> list[ir.TensorLoad]:
    """Return every load in `expr`, including those inside indices."""
    return [node for node in walk(expr) if isinstance(node, ir.TensorLoad)]


def uses(expr: Expr, variables: set[tirx.Var]) -> bool:
    """Return whether any of the variables occurs in `expr`."""
    return any(isinstance(node, tirx.Var) and node in variables for node in walk(expr))


def flatten_index(shape: Sequence[Expr], indices: Sequence[Expr]) -> Expr:
    """Return the offset of an element from the start of a row-major tensor, in elements."""
    position: Expr = tirx.const(0, "int64")
    for index, extent in zip(indices, shape):
        position = position * extent + index
    return position
