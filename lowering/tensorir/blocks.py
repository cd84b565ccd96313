"""TVM's blocks: functions as te.create_prim_func and FuseTIR write them, loops around one leaf block with one store."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import s_tir, tirx

from .expressions import Expr, is_int, substitute

BLOCK_ATTRIBUTE = "s_tir"
"""The attribute of functions of blocks, as TVM's own operators are; our kernels are loops and threads."""


def lower_blocks(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a CPU function without blocks, lowered by the passes that TVM runs in code generation."""
    if BLOCK_ATTRIBUTE not in func.attrs:
        return func
    transform = s_tir.transform
    passes = [
        transform.LowerInitBlock(),
        transform.PlanAndUpdateBufferAllocationLocation(),
        transform.ConvertBlocksToOpaque(),
        transform.CompactBufferAllocation(),
        transform.LowerMatchBuffer(),
        transform.LowerOpaqueBlock(),
    ]
    return tvm.ir.transform.Sequential(passes)(tvm.IRModule({"main": func}))["main"].without_attr(BLOCK_ATTRIBUTE)


def is_reduction(axis: tirx.IterVar) -> bool:
    """Return whether values along the axis are accumulated or otherwise reduced."""
    return axis.iter_type == 2  # kCommReduce: TVM has no name for it in Python


@dataclass(frozen=True, eq=False)
class LeafBlock:
    """buffer[indices] = value for all 0 <= variables < extents; if there are reduce axes, = init first.

    spatial and reduce map each variable to its extent. Each variable has its own loop.
    """

    buffer: tirx.Buffer
    indices: list[Expr]
    value: Expr
    init: Expr | None
    spatial: dict[tirx.Var, Expr]
    reduce: dict[tirx.Var, Expr]


def read_block(nest: tirx.Stmt) -> LeafBlock | None:
    """Return the block of a loop nest.

    Return None for predicates, several stores, local buffers of the block, and indices that are not int64.
    """
    loops: set[tirx.Var] = set()
    while isinstance(nest, tirx.For):
        if nest.kind != tirx.ForKind.SERIAL or not is_int(nest.min, 0) or nest.loop_var.ty != "int64":
            return None
        loops.add(nest.loop_var)
        nest = nest.body
    if not isinstance(nest, s_tir.SBlockRealize) or not is_int(nest.predicate, 1):
        return None
    block, store = nest.block, nest.block.body
    if block.match_buffers or block.alloc_buffers or not isinstance(store, tirx.BufferStore):
        return None
    spatial: dict[tirx.Var, Expr] = {}
    reduce: dict[tirx.Var, Expr] = {}
    constants: dict[tirx.Var, Expr] = {}
    for iter_var, value in zip(block.iter_vars, nest.iter_values):
        if value in loops:
            loops.remove(value)
            axes = reduce if is_reduction(iter_var) else spatial
            axes[iter_var.var] = iter_var.dom.extent
        elif isinstance(value, tirx.IntImm):
            constants[iter_var.var] = value
        else:
            return None
    if loops or (block.init is not None) != bool(reduce):
        return None
    init = None
    if block.init is not None:
        if not isinstance(block.init, tirx.BufferStore) or not block.init.buffer.same_as(store.buffer):
            return None
        init = substitute(block.init.value, constants)
    indices = [substitute(index, constants) for index in store.indices]
    return LeafBlock(store.buffer, indices, substitute(store.value, constants), init, spatial, reduce)
