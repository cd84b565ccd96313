"""Operands of matmuls as tensors of TMA: chunks of 16 bytes, equally far apart along each axis."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from lowering.tensorir.expressions import Expr, is_int, substitute, uses

from .matmul_reader import Matmuls, Operand, Order
from .shared_tile import CHUNK


@dataclass(frozen=True)
class Reach:
    """An operand as a tensor of TMA: elements between neighbors along its rows (or columns), and along batch axes."""

    operand: Operand
    outer: Expr
    batch: tuple[tuple[tirx.Var, Expr, Expr], ...]
    """Batch axes that it has, with their extents and strides."""


def reach(matmuls: Matmuls, operand: Operand) -> Reach | None:
    """The operand for TMA: in chunks at all sizes, and equally far apart along every axis; None for any other."""
    simplify, axes = matmuls.facts.simplify, matmuls.matrices
    start, along = operand.start, operand.along
    if operand.condition is not None or operand.order is Order.NONE or operand.codes is not None:
        return None

    def stride(expr: Expr, var: tirx.Var) -> Expr | None:
        step = simplify(substitute(expr, {var: var + 1}) - expr)
        variables = {operand.outer, operand.k, *(axis.var for axis in axes)}
        return None if uses(step, variables) else step

    outer, k = stride(start, operand.outer), stride(along, operand.k)
    batch = [(axis.var, axis.extent, stride(start, axis.var)) for axis in axes]
    if outer is None or k is None or any(step is None for *_, step in batch):
        return None
    zero = tirx.const(0, "int64")
    everywhere = {operand.outer: zero, **{axis.var: zero for axis in axes}}
    if not is_int(simplify(substitute(start, everywhere)), 0):
        return None
    there = tuple((var, extent, step) for var, extent, step in batch if step is not None and not is_int(step, 0))
    strides = [outer if operand.order is Order.K else k, *(step for *_, step in there)]
    whole = all(is_int(simplify(step % CHUNK), 0) for step in strides)
    return Reach(operand, outer if operand.order is Order.K else k, there) if whole and len(there) <= 3 else None
