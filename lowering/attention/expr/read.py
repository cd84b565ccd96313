"""Conversion of TensorIR to expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import ir, tirx
from tvm.ir import prim

from .emit import CLASSES
from .node import INDICES, Expr, canonicalize, make_number

_OPERATIONS: dict[type, str] = {kind: op for op, kind in CLASSES.items() if op != "select"} | {
    prim.GT: "gt",
    prim.GE: "ge",
}

IF_THEN_ELSE = "prim.if_then_else"


def read_expr(
    value: ir.Expr, indices: Sequence[tirx.Var], sizes: Sequence[tirx.Var], tables: Sequence[tirx.Buffer]
) -> Expr:
    """Return the canonical form of `value`, an expression of the indices (b, h, i, j[, s]), the sizes and loads of the
    tables.

    Sizes and tables are called size_0, ... and table_0, ... in the given order.

    Raises ValueError for an expression that cannot be represented.
    """
    leaves: dict[tirx.Var, Expr] = {var: Expr("index", str(var.ty), value=name) for name, var in zip(INDICES, indices)}
    leaves |= {var: Expr("scalar", str(var.ty), value=f"size_{k}") for k, var in enumerate(sizes)}
    return canonicalize(_read(value, leaves, {table: f"table_{k}" for k, table in enumerate(tables)}))


def _read(value: ir.Expr, leaves: Mapping[tirx.Var, Expr], tables: Mapping[tirx.Buffer, str]) -> Expr:
    def read(operand: ir.Expr) -> Expr:
        return _read(operand, leaves, tables)

    dtype = str(value.ty)
    if isinstance(value, tirx.Var):
        return leaves[value]
    if isinstance(value, prim.IntImm | prim.FloatImm):
        return make_number(value.value, dtype)
    if isinstance(value, ir.TensorLoad):
        return Expr("load", dtype, tuple(map(read, value.indices)), tables[value.source])
    if type(value) in _OPERATIONS:
        operands = (value.a,) if isinstance(value, prim.Not) else (value.a, value.b)
        return Expr(_OPERATIONS[type(value)], dtype, tuple(map(read, operands)))
    if isinstance(value, prim.Select):
        return Expr("select", dtype, tuple(map(read, (value.condition, value.true_value, value.false_value))))
    if isinstance(value, prim.Cast):
        return Expr("cast", dtype, (read(value.value),))
    if isinstance(value, ir.Call) and isinstance(value.op, ir.Op) and not value.ty_args:
        name = "select" if value.op.name == IF_THEN_ELSE else value.op.name
        return Expr(name, dtype, tuple(map(read, value.args)))
    raise ValueError(f"{type(value).__name__} is not part of an expression")
