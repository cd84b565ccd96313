"""Operands of matmuls as tensors of TMA: chunks of 16 bytes with a constant stride along each axis."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from lowering.tensorir.expressions import Expr, is_int, substitute, uses

from ..primitives.shared_tile import CHUNK
from .matmul_reader import Matmuls, Operand, Order


@dataclass(frozen=True)
class TmaOperand:
    """An operand as a tensor of TMA: the strides in elements along its rows (or columns), and along batch axes."""

    operand: Operand
    outer: Expr
    batch: tuple[tuple[tirx.Var, Expr, Expr], ...]
    """Its batch axes, with their extents and strides."""


def read_tma_operand(matmuls: Matmuls, operand: Operand) -> TmaOperand | None:
    """Return the operand for TMA: in chunks at all sizes, with a constant stride along every axis; None for any
    other.
    """
    simplify, axes = matmuls.facts.simplify, matmuls.matrices
    start, along = operand.start, operand.along
    if operand.condition is not None or operand.order is Order.NONE or operand.quantized is not None:
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
    origin = {operand.outer: zero, **{axis.var: zero for axis in axes}}
    if not is_int(simplify(substitute(start, origin)), 0):
        return None
    strided_axes = tuple((var, extent, step) for var, extent, step in batch if step is not None and not is_int(step, 0))
    strides = [outer if operand.order is Order.K else k, *(step for *_, step in strided_axes)]
    is_aligned = all(is_int(simplify(step % CHUNK), 0) for step in strides)
    return (
        TmaOperand(operand, outer if operand.order is Order.K else k, strided_axes)
        if is_aligned and len(strided_axes) <= 3
        else None
    )
