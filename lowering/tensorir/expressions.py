"""TensorIR's scalar expressions: walking and rewriting them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from tvm import ir, tirx
from tvm.ir import prim

Expr: TypeAlias = ir.Expr

_CHEAP = ("prim.if_then_else", "tirx.fabs", "tirx.reinterpret")


def is_int(value: Expr, wanted: int) -> bool:
    return isinstance(value, prim.IntImm) and value.value == wanted


def is_float(value: Expr) -> bool:
    return str(value.ty).startswith(("float", "bfloat"))


def children(expr: Expr) -> list[Expr]:
    """Operands of a scalar expression; a load's are its indices."""
    kind: object = type(expr)
    fields, several = _operands(kind)
    return list(getattr(expr, several)) if several else [getattr(expr, field) for field in fields]


@functools.cache
def _operands(kind: type) -> tuple[tuple[str, ...], str]:
    """In which fields expressions of a type have their operands; or in which one all of them. TVM's types are abstract,
    and asking each expression what it is takes long."""
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
    """`expr` with other operands of the same types, in the order of `children`."""
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
    """`expr` with every node for which `replace` gives an expression replaced by it, outermost nodes first.

    As deep as memory allows: no recursion.
    """
    # Operands' results, each behind its left neighbors'. A node comes up twice: at first its operands are put on top
    # of it, and when they are done it takes their results.
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
    """`expr` with variables replaced."""
    return rewrite(expr, lambda e: values.get(e) if isinstance(e, tirx.Var) else None) if values else expr


def walk(expr: Expr) -> Iterator[Expr]:
    """Every node of `expr`, each before its operands."""
    todo = [expr]
    while todo:
        node = todo.pop()
        yield node
        todo += reversed(children(node))


def is_function(expr: Expr) -> bool:
    """Whether `expr` calls a function that takes more than an instruction or two."""
    return isinstance(expr, ir.Call) and expr.op.name not in _CHEAP


def loads(expr: Expr) -> list[ir.TensorLoad]:
    """Every load in `expr`, those inside indices included."""
    return [node for node in walk(expr) if isinstance(node, ir.TensorLoad)]


def uses(expr: Expr, variables: set[tirx.Var]) -> bool:
    """Whether any of the variables occurs in `expr`."""
    return any(isinstance(node, tirx.Var) and node in variables for node in walk(expr))


def offset(shape: Sequence[Expr], indices: Sequence[Expr]) -> Expr:
    """Position of an element from the start of a row-major tensor, in elements."""
    position: Expr = tirx.const(0, "int64")
    for index, extent in zip(indices, shape):
        position = position * extent + index
    return position
